"""The calls of a user's modules: their arguments, the slots that replace them, and how to repeat one."""
