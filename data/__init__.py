"""Holds batches, datasets, conversations as token ids, seeds, and loads users' files."""
