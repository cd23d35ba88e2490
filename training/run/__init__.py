"""What surrounds a run's training: its process and roles, checkpoints, metrics and episodes, and the report on them."""
