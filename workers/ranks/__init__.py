"""The ranks of a run: how workers are placed and called on them, how they share work, and how a process starts."""
