"""Proof that captured code gives the numbers of the code as it was written."""
