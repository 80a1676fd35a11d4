"""Measuring operations and steps: times, workspace, what is in memory before a step."""
