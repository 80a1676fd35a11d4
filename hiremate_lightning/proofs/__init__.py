"""Proof that captured code gives the numbers of eager PyTorch."""
