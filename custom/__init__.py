"""The user's part: environments, agents, tools and rewards, made to be edited.

Invariant: nothing here imports the trainer or its workers.
"""

from data import moved_modules

moved_modules.install()
