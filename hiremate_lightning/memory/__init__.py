"""The memory of a device: bytes that its allocator hands out, live bytes, and the cost of touching memory."""
