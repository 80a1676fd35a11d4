"""Running a schedule on a captured graph."""
