"""Proves that states of an environment can be had again, before any branch begins in one.

    an episode of random answers             reset  a0 r0  a1 r1  a2 r2   its reward
    replay: another agent, the same answers  reset  a0 r0' a1 r1' a2 r2'
    snapshot, copy: another agent, put into the state before turn 1
                                                           a1 r1' a2 r2'

Observations, rewards and the end must all be equal: equal observations alone do not prove equal
states, as what was paid at the end may depend on what nobody saw. Before answers are given again, a
third agent plays a turn of another episode: what agents share, as a global or a file, then holds
that episode's state. Invariant: the calls, with their deadlines, are those of play; each
state goes into an agent other than the one that it was taken of.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from custom.env import Task
from data.seeds import seed_beside
from features.branching.settings import BranchingSettings
from features.branching.states import KINDS, MEGABYTE, NO_SNAPSHOT, REFUSAL
from training.config import PPOConfig
from workers.agent_pools import open_pool
from workers.environments.names import CannotBuild, environment_source
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply

logger = logging.getLogger(__name__)
STATES = "features.branching.states"
REPLAY = "replay"
# How a state may be had, the preferred one first.
WAYS = (*KINDS, REPLAY)
MAX_SHOWN_CHARS = 80
# An environment that crashes now and then is no reason to refuse its states.
TRIES = 3


class CannotRepeat(Exception):
    """Says why a way to have a state again does not hold."""


class CallCrashed(CannotRepeat):
    """Says that a call of the trial raised, which proves nothing of a state."""


class Proved(NamedTuple):
    """Says how states of an environment are had again.

    Attributes:
        way: one of WAYS; "": in none.
        reasons: why each way that was tried before it does not hold.
    """

    way: str
    reasons: dict[str, str]


@dataclass
class TriedEpisode:
    """Holds an episode of the trial.

    Attributes:
        key: of the pool. actions: that were given. replies: to the reset and to each action.
        states: by way, the text of `states.take` before each action.
    """

    key: int
    actions: list[str] = field(default_factory=list)
    replies: list[StepReply] = field(default_factory=list)
    states: dict[str, list[str]] = field(default_factory=dict)


def prove(
    config: PPOConfig, spec: Any, settings: BranchingSettings, seed: int, task: Task | None
) -> Proved:
    """Finds the first way to have an environment's states again that holds in a trial.

    Args:
        spec: of the environment's agents. seed, task: of the first episode that is tried.
    """
    ways = WAYS if settings.state == "proved" else (settings.state,)
    reasons: dict[str, str] = {}
    with open_pool(config, [spec]) as pool:
        try:
            _ = pool.tool_schemas
        except CannotBuild as error:
            return Proved("", {ways[0]: "; ".join(error.problems)})
        trial = _Trial(pool, settings, spec.max_turn or config.agent.max_turn)
        for way in ways:
            try:
                for number in range(settings.trial_episodes):
                    trial.require_in_some_try(way, seed + number, task)
            except CannotRepeat as error:
                reasons[way] = str(error)
                continue
            return Proved(way, reasons)
    return Proved("", reasons)


class _Trial:
    """Plays episodes twice, in agents of their own."""

    def __init__(self, pool: EnvironmentPool, settings: BranchingSettings, max_turn: int) -> None:
        self.pool = pool
        self.settings = settings
        self.max_turn = max_turn
        self.last_key = 0
        # Of episodes between others, whose answers and ends nobody compares.
        self.last_stranger = 0

    def require_in_some_try(self, way: str, seed: int, task: Task | None) -> None:
        """Requires that a way holds; an episode in which a call crashes is tried again.

        Raises:
            CannotRepeat: it does not, or calls crash in each try.
        """
        for _ in range(TRIES - 1):
            try:
                return self.require(way, seed, task)
            except CallCrashed as error:
                logger.warning("branching: in the trial of its states %s; it is tried again", error)
        return self.require(way, seed, task)

    def require(self, way: str, seed: int, task: Task | None) -> None:
        """Requires that a way holds in the episode of a seed.

        Raises:
            CannotRepeat: it does not.
        """
        original = self._play_first(way, seed, task)
        # The original is ended last, so that no agent of it is free for what is to equal it.
        rewards = []
        for turn in self._turns(way, original):
            rewards.append(self._end(self._play_again(way, original, turn, seed, task)))
        reward = self._end(original)
        for again in rewards:
            self._require_equal("the episode's reward", again, reward)

    def _play_first(self, way: str, seed: int, task: Task | None) -> TriedEpisode:
        """Plays an episode of random answers, and takes its states."""
        played = TriedEpisode(self._new_key())
        self.pool.reset(played.key, 0, seed, task)
        played.replies.append(self._reply("reset"))
        if self.settings.luck == "fresh":
            self._require_luck(way, played.key)
        while not played.replies[-1].done and len(played.actions) < self.max_turn:
            if way in KINDS:
                max_bytes = self.settings.max_state_mb * MEGABYTE
                state = self._visit(played.key, "take", way, max_bytes)
                if state.startswith(REFUSAL):
                    raise CannotRepeat(state.removeprefix(REFUSAL))
                played.states.setdefault(way, []).append(state)
            said = " ".join(message["content"] for message in played.replies[-1].messages)
            action = self._visit(played.key, "random_action", seed, len(played.actions), said)
            played.actions.append(action)
            self.pool.step(played.key, action)
            played.replies.append(self._reply("step"))
        return played

    def _turns(self, way: str, original: TriedEpisode) -> Iterator[int]:
        """Yields the turns from which an episode is played again: the first, a middle, the last."""
        last = len(original.actions) - 1
        if way == REPLAY:
            yield 0
            return
        yield from sorted({0, (last + 1) // 2, last})

    def _play_again(
        self, way: str, original: TriedEpisode, turn: int, seed: int, task: Task | None
    ) -> TriedEpisode:
        """Plays the same answers from a turn on, in another agent; each reply must be the same."""
        again = TriedEpisode(self._new_key())
        if way == REPLAY:
            self.pool.reset(again.key, 0, seed, task)
            first = self._reply("reset")
            self._require_equal_replies("the first observation", first, original.replies[0])
        else:
            state = original.states[way][turn]
            self.pool.restore(again.key, 0, f"{STATES}:put", way, state, None)
            self._reply("restore")
        self._play_stranger(seed, task)
        for number, action in enumerate(original.actions[turn:], start=turn):
            self.pool.step(again.key, action)
            again.replies.append(self._reply("step"))
            what = f"the answer to turn {number}"
            if way in KINDS:
                what += f" behind the state before turn {turn}"
            self._require_equal_replies(what, again.replies[-1], original.replies[number + 1])
        return again

    def _play_stranger(self, seed: int, task: Task | None) -> None:
        """Plays a turn of another episode, as the batch's other episodes would meanwhile."""
        stranger = TriedEpisode(self._new_key())
        self.last_stranger += 1
        own = seed_beside(seed, f"stranger {self.last_stranger}")
        self.pool.reset(stranger.key, 0, own, task)
        reply = self._reply("reset")
        if not reply.done:
            said = " ".join(message["content"] for message in reply.messages)
            action = self._visit(stranger.key, "random_action", own, 0, said)
            self.pool.step(stranger.key, action)
            reply = self._reply("step")
        stranger.replies.append(reply)
        self._end(stranger)

    def _end(self, played: TriedEpisode) -> float | None:
        """Ends an episode; returns the reward that replaces its turns', if there is one."""
        ending = "done" if played.replies[-1].done else "max_turns"
        self.pool.finish(played.key, ending)
        return self._reply("finish").reward

    def _require_luck(self, way: str, key: int) -> None:
        """Requires that an environment's luck can be drawn anew."""
        if way == REPLAY:
            raise CannotRepeat("what is played again has the episode's own luck (branching.luck)")
        if "reseed" not in json.loads(self._visit(key, "what_is_offered")):
            raise CannotRepeat("branching.luck=fresh needs a method reseed(seed), and it has none")

    def _require_equal_replies(self, what: str, reply: StepReply, original: StepReply) -> None:
        said = [[message["content"] for message in each.messages] for each in (reply, original)]
        self._require_equal(f"{what}: its text", *said)
        self._require_equal(f"{what}: its reward", reply.reward, original.reward)
        self._require_equal(f"{what}: its end", reply.done, original.done)

    def _require_equal(self, what: str, again: object, first: object) -> None:
        if again != first:
            raise CannotRepeat(
                f"{what} was {str(first)[:MAX_SHOWN_CHARS]} first, and "
                f"{str(again)[:MAX_SHOWN_CHARS]} when it was played again"
            )

    def _visit(self, key: int, function: str, *args: Any) -> str:
        self.pool.visit(key, f"{STATES}:{function}", *args)
        return self._reply(function).said

    def _reply(self, call: str) -> StepReply:
        """Waits for the reply to the one call that was made."""
        reply = self.pool.wait_for_reply()
        if reply.failure == "env_crash":
            raise CallCrashed(f"{call} failed ({reply.failure}): {in_one_line(reply.error)}")
        if reply.failure:
            raise CannotRepeat(f"{call} failed ({reply.failure}): {in_one_line(reply.error)}")
        return reply

    def _new_key(self) -> int:
        self.last_key += 1
        return self.last_key


def in_one_line(error: str) -> str:
    """Returns what a call raised, with the place in the user's file, in one line."""
    first, *trace = error.splitlines() or [""]
    places = [line.strip() for line in trace if line.lstrip().startswith("File ")]
    return f"{first} ({places[0]})" if places else first


def tell(spec: Any, proved: Proved, settings: BranchingSettings) -> None:
    """Logs how an environment's states are had; it warns where a snapshot is there and unused."""
    why = "".join(f"; not by {way}: {reason}" for way, reason in _first_lines(proved))
    snapshot = proved.reasons.get("snapshot", NO_SNAPSHOT)
    logger.log(
        logging.INFO if snapshot.endswith(NO_SNAPSHOT) else logging.WARNING,
        "branching: states of %s are had by %s, which held in %d episodes%s",
        environment_source(spec.source),
        proved.way,
        settings.trial_episodes,
        why,
    )


def refusal(spec: Any, proved: Proved, settings: BranchingSettings) -> str:
    """Says that an environment's states cannot be had again, and why."""
    remedies = ["have reset(seed) decide all that is drawn"]
    remedies.append("write snapshot() and restore(bytes) (features/branching/README.md)")
    if settings.state != "proved":
        remedies.append("set branching.state=proved, which tries all ways")
    if settings.luck == "fresh":
        remedies.append("set branching.luck=same")
    reasons = "; ".join(f"{way}: {reason}" for way, reason in _first_lines(proved))
    return (
        f"branching: no state of environment {environment_source(spec.source)} can be had again, "
        f"so that every branch is refused ({reasons}): {', or '.join(remedies)}"
    )


def _first_lines(proved: Proved) -> Iterator[tuple[str, str]]:
    """Yields each way that does not hold with its reason, without a traceback."""
    for way, reason in proved.reasons.items():
        yield way, reason.partition("\n")[0]
