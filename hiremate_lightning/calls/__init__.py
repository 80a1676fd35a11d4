"""The calls of a user's modules: what they are given, what stands in for them, and how to repeat one."""
