"""The command `hiremate`; it can plan without a device."""
