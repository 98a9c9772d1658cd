"""What runs in the next step. Pure Python: no tensors."""
