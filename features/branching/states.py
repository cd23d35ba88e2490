"""States of environments: they are taken where the environment lives, and put into another agent.

    snapshot    the environment's own `snapshot() -> bytes` and `restore(bytes)`
    copy        the environment itself, pickled

What a reward function reads of the episode so far, its trajectory, goes along. Invariant: `take`
never raises, so that a state that cannot be had costs its branches and not the episode; nothing
here imports torch.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
from contextlib import suppress
from typing import Any

from custom.agent import Agent
from custom.coroutines import finished
from custom.env_calls import call_method, raised

KINDS = ("snapshot", "copy")
# A text of `take` begins with one of these.
STATE = "+"
REFUSAL = "-"
MEGABYTE = 1 << 20
MAX_REASON_CHARS = 300
# Ends the reason of an environment that never meant to give its state.
NO_SNAPSHOT = "has no snapshot()"


class NoState(ValueError):
    """Says why an agent's state cannot be had, in a whole sentence."""


def take(agent: Any, kind: str, max_bytes: int) -> str:
    """Returns the agent's state as a text, or the reason why there is none.

    Args:
        kind: one of KINDS.
        max_bytes: a larger state is refused.
    """
    try:
        state = _state_of(agent, kind)
    except NoState as error:
        return REFUSAL + str(error)
    # Whatever a user's code raises, but for what ends the call.
    except Exception as error:
        method = getattr(agent.environment, "snapshot", None) if kind == "snapshot" else None
        return REFUSAL + raised(error, method)[:MAX_REASON_CHARS]
    if len(state) > max_bytes:
        return (
            f"{REFUSAL}its {kind} has {len(state) / MEGABYTE:.1f} MB, and branching.max_state_mb "
            f"allows {max_bytes / MEGABYTE:.0f}"
        )
    return STATE + base64.b64encode(state).decode()


def put(agent: Any, kind: str, state: str, luck_seed: int | None) -> str:
    """Puts a state of `take` into an agent, which may never have been reset.

    Args:
        luck_seed: the luck to come is drawn with it (the environment's `reseed`); None: it stays.
    """
    trajectory, held = pickle.loads(base64.b64decode(state.removeprefix(STATE)))
    _require_plain(agent)
    if kind == "snapshot":
        finished(agent.environment.restore(held))
    else:
        # It may refuse to be closed, which is none of the state's fault.
        with suppress(Exception):
            call_method(agent.environment, "close")
        agent.environment = held
    agent.trajectory = trajectory
    if luck_seed is not None:
        finished(agent.environment.reseed(luck_seed))
    return ""


def _state_of(agent: Any, kind: str) -> bytes:
    """Returns the agent's state.

    Raises:
        NoState: it has a state beside its environment's, or no snapshot.
        whatever the environment raises.
    """
    _require_no_class(agent)
    environment = agent.environment
    name = type(environment).__name__
    if kind == "snapshot":
        if not callable(getattr(environment, "snapshot", None)):
            raise NoState(f"{name} {NO_SNAPSHOT}")
        if not callable(getattr(environment, "restore", None)):
            raise NoState(f"{name} has snapshot(), and no restore(state)")
    _require_plain(agent)
    if kind == "copy":
        return pickle.dumps((agent.trajectory, environment), pickle.HIGHEST_PROTOCOL)
    held = finished(environment.snapshot())
    if not isinstance(held, bytes):
        raise NoState(f"{name}.snapshot() returned a {type(held).__name__}; allowed: bytes")
    return pickle.dumps((agent.trajectory, held), pickle.HIGHEST_PROTOCOL)


def _require_no_class(agent: Any) -> None:
    """Raises NoState where the agent is of a user's class, which may hold a state."""
    if type(agent) is not Agent:
        raise NoState("an agent class of one's own (agent.cls) may hold a state of its own")


def _require_plain(agent: Any) -> None:
    """Raises NoState where an agent has a state beside its environment's."""
    _require_no_class(agent)
    if agent.manager is not None:
        raise NoState("its tools (agent.tools) may hold a state of their own")


def what_is_offered(agent: Any) -> str:
    """Says as JSON which methods beside `reset` and `step` the environment offers."""
    environment = getattr(agent, "environment", None)
    names = ("snapshot", "restore", "reseed")
    return json.dumps([name for name in names if callable(getattr(environment, name, None))])


def random_action(agent: Any, seed: int, turn: int, said: str) -> str:
    """Returns a random answer: the environment's `sample_action`, or a word of what it said."""
    draw = random.Random(f"branching {seed} {turn}")
    environment = getattr(agent, "environment", None)
    action = call_method(environment, "sample_action", draw)
    if action is not None:
        return str(action)
    return draw.choice(re.findall(r"\w+", said) or ["hello"])
