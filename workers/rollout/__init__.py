"""Generates: the interface of a rollout engine, the episodes it plays, and their batches."""
