"""Holds every setting of a run, a file a section: type, default, bounds, documentation and checks.

Names and meanings are verl's. Batch sizes count prompts, before each is repeated `rollout.n` times,
over all ranks; names that end in `_per_gpu` count rows or tokens on one rank. The text after `#:`
documents a field: `--help` and configs/ppo_trainer.yaml show it, and the first line of a section's
docstring. A value that follows from several fields is a property, derived in one place.
"""
