"""Users' environments: the pool that runs them, and the threads, processes and Ray actors where they live."""
