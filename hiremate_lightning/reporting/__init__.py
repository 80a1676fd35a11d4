"""Showing a plan: in a terminal, as pages and pictures, as metrics."""
