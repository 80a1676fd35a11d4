"""The memory of a device: bytes that its allocator takes, live bytes and their peaks, and free bytes."""
