"""The algorithm and the driver: configuration, the PPO maths, rewards and the trainer."""

from data import moved_modules

moved_modules.install()
