"""Which calls are planned, and how they come to a session."""
