"""What is known of each step signature, and what follows from that alone."""
