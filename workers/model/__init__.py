"""The models that train: how they are built, run, updated and saved."""
