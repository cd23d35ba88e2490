"""Computes metrics: of a step's batch, of validation, of episodes."""
