"""The joint graph as records, with the way back."""
