"""A run's policy as a folder that other programs load."""
