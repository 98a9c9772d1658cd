"""The engine and the text path inside tritonserver's Python backend."""
