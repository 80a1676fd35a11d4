"""Modules that repeat are captured once, and copied."""
