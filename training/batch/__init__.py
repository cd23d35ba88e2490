"""Cuts, groups and reduces a batch: episodes, ranks, micro-batches, masked maths."""
