"""Surrounds a run's training.

Its process and roles, checkpoints, metrics and episodes, and the report on them.
"""
