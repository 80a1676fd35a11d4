"""Decides which values to keep and which to recompute: strategies, and the plan."""
