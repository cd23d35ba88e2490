"""What runs beside the weights: training engines, rollout engines, and the groups of ranks that drive them."""
