"""CPU implementations, where the plain reference would be slow or read memory it need not."""
