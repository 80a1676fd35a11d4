"""What is known of each kind of step, and what follows from that alone."""
