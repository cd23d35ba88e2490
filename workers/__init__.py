"""What runs beside the weights: training engines, rollout engines and the groups that drive them."""
