"""Plays on from the state before a turn of a recorded episode, as branches of a run begin.

    record      reset  a0 r0  a1 r1  a2 r2      played again whole, in a fresh environment
    played on   reset  a0 r0 | b1 s1  b2 s2     from the state before turn 2, as often as asked

The state is had by the environment's snapshot, a copy of it, or its turns played again: by the
first of these that holds in a trial (features/branching). Invariant: nothing is unpickled but what
this process has pickled itself, and no file of records holds a state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from torch import nn

from features.records.episode_records import episode_records
from scripts.replay_continued import ContinuingEngine, Report
from scripts.replay_episodes import Recorded, as_read
from scripts.replay_player import Player, describe
from training.features import features
from training.run.abort_policy import EnvironmentsFail
from workers.multi_turn_rollout import AgentRollout
from workers.rollout.episode import Episode

if TYPE_CHECKING:
    from features.branching.continuing import Continuations

BRANCHING = "branching"


class NoState(Exception):
    """Says why the state before a turn cannot be had; "": nobody offers to have it."""


def play_on_from_state(
    player: Player,
    lm: nn.Module,
    episode: Recorded,
    until_turn: int,
    times: int,
    report: Report = print,
) -> list[Recorded]:
    """Plays an episode on from the state before a turn, the first being 1, with the model.

    Args:
        times: how often, each time with other draws.
    Returns: their records.
    Raises:
        NoState: it cannot be had.
    """
    if BRANCHING not in features() or not _has_states(episode, until_turn):
        raise NoState("")
    from features.branching.feature import open_continuations

    engine = ContinuingEngine(player.config, player.model, lm, episode, len(episode["turns"]))
    specs = [player.specs[episode["agent_index"] % len(player.specs)]]
    rollout = AgentRollout(player.config, engine, player.model.tokenizer, specs, None)
    described = describe(player.config, [episode])
    with closing(rollout):
        if rollout.questions is not None:
            raise NoState("")
        rule = open_continuations(player.config, rollout.specs, until_turn - 1, times)
        try:
            rule.prepare(described)
        except EnvironmentsFail as error:
            raise NoState(str(error)) from error
        batch = rollout.batch_of(described)
        batch.branches = rule
        rollout.loop.run(batch)
    [played] = batch.episodes
    _require_alike(episode, _record_of(played), until_turn)
    if not played.branches:
        raise NoState(_why_none(played, rule, until_turn))
    report(f"the state before turn {until_turn} is had by {rule.way_of(played)}")
    return [_record_of(branch) for branch in played.branches]


def _has_states(episode: Recorded, until_turn: int) -> bool:
    """Returns whether turns of an episode begin in states: not those of programs, nor a person's.

    Behind the last turn there is none, and what was asked meanwhile cannot be had again.
    """
    turns = episode["turns"]
    is_program = any(turn.get("asked") is not None and not turn.get("writes") for turn in turns)
    has_asides = any(turn.get("aside") for turn in turns)
    return not is_program and not has_asides and until_turn <= len(turns)


def _record_of(episode: Episode) -> Recorded:
    """Returns an episode as a file would have it, with its reward."""
    [record] = episode_records([episode])
    reward = float(sum(sum(row.reward_at.values()) for row in episode.rows))
    return {**as_read(episode.ending, record), "reward": reward, "error": episode.error}


def _require_alike(recorded: Recorded, played: Recorded, until_turn: int) -> None:
    """Raises NoState where what came before a turn went otherwise than in the record."""
    if played["initial_messages"] != recorded["initial_messages"]:
        raise NoState("played again, the environment begins otherwise than in the record")
    for number in range(until_turn - 1):
        for name in ("observation", "reward", "done"):
            turns = recorded["turns"], played["turns"][number : number + 1]
            if not turns[1] or turns[0][number][name] != turns[1][0][name]:
                raise NoState(
                    f"played again, turn {number + 1} has another {name} than in the record"
                )


def _why_none(played: Episode, rule: Continuations, until_turn: int) -> str:
    """Says why no continuation began."""
    refused = rule.why_refused(played)
    if refused:
        return f"the state before turn {until_turn} could not be taken: {refused}"
    return f"played again, the episode ends as {played.ending} before turn {until_turn}"


def tell_continuations(
    episode: Recorded,
    continued: list[Recorded],
    until_turn: int,
    tell: Callable[[Recorded, Recorded, int, Report], None],
    report: Report = print,
) -> None:
    """Prints how an episode went on each time, and what it earned on average."""
    for number, played in enumerate(continued, start=1):
        if len(continued) > 1:
            report(f"--- continuation {number} of {len(continued)}")
        tell(episode, played, until_turn, report)
        if played["error"]:
            report(f"({played['error']})")
    if len(continued) > 1:
        rewards = [played["reward"] for played in continued]
        report(
            f"--- reward {sum(rewards) / len(rewards):.4g} on average of {len(rewards)}, "
            f"{min(rewards):.4g} to {max(rewards):.4g}; the record: {episode.get('reward', 0.0):g}"
        )
