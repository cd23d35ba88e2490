"""The ranks of a run: how workers are placed and called, share a model, and start."""
