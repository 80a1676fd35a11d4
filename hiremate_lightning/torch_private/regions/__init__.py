"""Modules and blocks that repeat are captured once, and copied."""
