"""How a batch is cut, grouped and reduced, with the names by which verl's users know it."""

# ruff: noqa: F403
from training.batch.batching import *
from training.batch.torch_functional import *
