"""Proof that captured code gives the numbers of the code in eager mode."""
