"""Shows a plan: in a terminal, as a page, as pictures, as metrics."""
