"""Older names of features, which stand in features/ now; nothing is defined here."""

from data import moved_modules

moved_modules.install()
