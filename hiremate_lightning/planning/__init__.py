"""Deciding what to keep and what to compute again: strategies, and the plan."""
