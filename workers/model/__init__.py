"""The models that train: how they are built, laid out for the forward pass, attended to, updated and saved."""
