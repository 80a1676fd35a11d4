"""The memory of a device: what its allocator hands out, what is live, what touching it costs."""
