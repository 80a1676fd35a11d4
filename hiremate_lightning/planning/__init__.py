"""Deciding what to keep and what to compute again: where to cut a step, strategies, the plan."""
