"""Make Dynamo trace modules that repeat once, and copy the trace for the others."""
