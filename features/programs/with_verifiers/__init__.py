"""Episodes of verifiers' environments, played by verifiers itself in an interpreter of its own.

    spec             here: what starts an episode there, and whether the interpreter fits
    verifiers_driver there: the file that is run, or preloaded
    world            there: the environment, loaded once
    episode          there: one episode, and what it tells of itself
    run_renderer     there: between messages and ids, by the run's chat template

Invariant: what runs there imports the standard library, verifiers' own packages, and of this
project what needs nothing else.
"""
