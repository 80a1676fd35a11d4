"""A training step as records without torch: its graph, costs and schedules, and the simulator."""
