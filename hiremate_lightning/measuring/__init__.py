"""Measuring operations and steps: times, workspace, and the memory that exists before a step."""
