"""The algorithm and the driver: configuration, the PPO maths, rewards and the trainer."""
