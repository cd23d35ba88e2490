"""Runs beside the weights: training and rollout engines, and the groups of ranks that do it."""

from data import moved_modules

moved_modules.install()
