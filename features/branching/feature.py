"""Credit of turns, measured by continuations, and how well estimators agree with it."""

from training.features import Feature

FEATURE = Feature()
