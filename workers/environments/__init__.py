"""Users' environments: the pool that runs them, and the places where they live."""
