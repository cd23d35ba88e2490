"""Holds batches, datasets, conversations as token ids, seeds, and loads users' files."""

from data import moved_modules

moved_modules.install()
