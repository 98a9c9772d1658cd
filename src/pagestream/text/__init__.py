"""Text to token ids and back. No tensors, no engine."""
