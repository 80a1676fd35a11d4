"""The command `hiremate`, and planning without a device."""
