"""Environments of other libraries, LIBRARY:ID, played as games of text."""

from training.features import Feature

FEATURE = Feature(
    libraries="features.adapters.libraries:LIBRARIES",
    moved_modules={"contrib.adapters": "features.adapters"},
)
