"""The records of step signatures, and the decisions that follow from them alone."""
