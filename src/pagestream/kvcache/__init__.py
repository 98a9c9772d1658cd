"""Who owns which KV-cache blocks. Pure Python: no tensors."""
