"""Tools of an agent: what a model may call, how its calls are read out of a text, and what comes of them.

`parsers` reads calls, `registry` says what a tool is, finds those that a config names, executes single calls and plays
whole turns. Invariant: whatever a model writes and a tool does, the episode goes on with an observation; only the
environment's own failures are raised.
"""

# ruff: noqa: F403
from custom.tools.parsers import *
from custom.tools.registry import *
