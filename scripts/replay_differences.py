"""Compares recorded episodes with their replay, and names each difference in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.replay_episodes import Recorded, timed_out, without_asides, without_timed_out_call
from scripts.replay_player import Player
from workers.rollout.episode import LEFT

# So many episodes have their environments open at once.
TOGETHER = 16
# So much of a value stands in a line.
MAX_CHARS = 100
COMPARED_COLUMNS = ("prompt_ids", "response_ids", "response_mask", "turn_ids")


def compare(player: Player, episodes: Sequence[Recorded]) -> list[str]:
    """Writes one line for each difference between the episodes and their replay."""
    lines = []
    for start in range(0, len(episodes), TOGETHER):
        some = episodes[start : start + TOGETHER]
        lines += _compare_tokens(player, some)
        lines += _compare_environments(player, some)
    return lines


def _compare_tokens(player: Player, episodes: Sequence[Recorded]) -> list[str]:
    """Compares rows and texts with what the turn loop makes of the recorded answers.

    The branches of a program are made again only by the program itself, and what an environment
    asked the policy only by the environment.
    """
    lines: list[str] = []
    joined = [without_asides(episode) for episode in episodes if not has_branches(episode)]
    if not joined:
        return lines
    for episode, rejoined in zip(joined, player.rejoin(joined), strict=True):
        lines += _lines_of(episode, token_differences(episode, rejoined))
    return lines


def _compare_environments(player: Player, episodes: Sequence[Recorded]) -> list[str]:
    """Compares the answers with those of fresh environments.

    An episode that differs is played once more, which tells an environment that is not
    reproducible from one that has changed.
    """
    # Where the very first call timed out there is nothing to compare.
    asked = []
    for episode in episodes:
        if episode["initial_messages"] or not timed_out(episode):
            asked.append(without_timed_out_call(episode))
    if not asked:
        return []
    lines = []
    differing = []
    for episode, played in zip(asked, player.play(asked), strict=True):
        differences = list(play_differences(episode, played))
        lines += _lines_of(episode, differences)
        if differences:
            differing.append((episode, played))
    if not differing:
        return lines
    second = player.play([episode for episode, _ in differing])
    for (episode, played), played_again in zip(differing, second, strict=True):
        if any(play_differences(played, played_again)):
            seed = episode["env_seed"]
            lines += _lines_of(
                episode,
                [
                    "the environment is not reproducible: "
                    f"two replays with env_seed={seed} differ, too"
                ],
            )
    return lines


def _lines_of(episode: Recorded, differences: Iterator[str] | Sequence[str]) -> list[str]:
    """Puts the episode's name before each difference."""
    name = f"{episode['where']}: {episode['data_source']}, episode {episode['episode_id']}"
    return [f"{name}: {difference}" for difference in differences]


def token_differences(recorded: Recorded, rejoined: Recorded) -> Iterator[str]:
    """Names where texts and rows are not what the tokenizer makes of the episode."""
    turns = zip(recorded["turns"], rejoined["turns"], strict=False)
    for number, (old, new) in enumerate(turns, start=1):
        yield from difference(f"turn {number}, text of its ids", old["text"], new["text"])
    if len(recorded["rows"]) != len(rejoined["rows"]):
        yield f"rows: recorded {len(recorded['rows'])}, replayed {len(rejoined['rows'])}"
    rows = zip(recorded["rows"], rejoined["rows"], strict=False)
    for number, (old, new) in enumerate(rows):
        for name in COMPARED_COLUMNS:
            yield from first_difference(f"row {number}, {name}", old[name], new[name])


def play_differences(recorded: Recorded, played: Recorded) -> Iterator[str]:
    """Names where the environment answered otherwise.

    Rewards of rows are compared only where its answers are the same.
    """
    if has_branches(recorded):
        yield from branch_differences(recorded, played)
        return
    answers = list(_answer_differences(recorded, played))
    yield from answers
    yield from ending_difference(recorded, played)
    if answers:
        return
    rows = zip(recorded["rows"], played["rows"], strict=False)
    for number, (old, new) in enumerate(rows):
        yield from first_difference(f"row {number}, rewards", old["rewards"], new["rewards"])


def has_branches(episode: Recorded) -> bool:
    """Returns whether a program had several conversations."""
    return bool(episode.get("program")) and len(episode["rows"]) > 1


def branch_differences(recorded: Recorded, played: Recorded) -> Iterator[str]:
    """Names where a program had other conversations, in whichever order they came."""
    yield from ending_difference(recorded, played)
    missing = _rows_read(played)
    for number, row in enumerate(_rows_read(recorded)):
        if row in missing:
            missing.remove(row)
        else:
            yield f"row {number} is not in the replay"
    if missing:
        yield f"{len(missing)} rows of the replay are not in the record"
    paid = [sum(sum(row["rewards"]) for row in episode["rows"]) for episode in (recorded, played)]
    yield from difference("rewards in all", *paid)


def _rows_read(episode: Recorded) -> list[list[list[int]]]:
    """Returns of each row what it reads as, and what of it was sampled."""
    return [
        [list(row[name]) for name in ("prompt_ids", "response_ids", "response_mask")]
        for row in episode["rows"]
    ]


def _answer_differences(recorded: Recorded, played: Recorded) -> Iterator[str]:
    """Names where observations, rewards or ends of turns differ."""
    yield from difference(
        "initial messages", recorded["initial_messages"], played["initial_messages"]
    )
    turns = zip(recorded["turns"], played["turns"], strict=False)
    for number, (old, new) in enumerate(turns, start=1):
        if (old["done"] is None) != (new["done"] is None):
            yield f"turn {number}: {answered(old)} in the record, {answered(new)} in the replay"
            continue
        for name in ("observation", "reward", "done"):
            yield from difference(f"turn {number}, {name}", old[name], new[name])


def answered(turn: Recorded) -> str:
    """Describes whether, and with what, the environment answered the turn."""
    if turn["done"] is None:
        return "not answered"
    return f"answered {short(turn['observation'])}"


def ending_difference(recorded: Recorded, played: Recorded) -> list[str]:
    """Names the difference of two endings; none where they are the same."""
    if recorded["ending"] == played["ending"]:
        return []
    # Nor had the person who left.
    if recorded["ending"] == LEFT and played["ending"] == "engine_error":
        return []
    # The replay's engine had no further turn to answer with.
    if played["ending"] == "engine_error":
        replayed = ": the episode goes on"
    else:
        replayed = f" {_named_ending(played)}"
    return [f"ending: recorded {_named_ending(recorded)}, replayed{replayed}"]


def _named_ending(episode: Recorded) -> str:
    """Writes an ending with the first line of its error."""
    error = episode.get("error")
    if not error:
        return episode["ending"]
    return f"{episode['ending']} ({error.splitlines()[0]})"


def difference(what: str, old: Any, new: Any) -> list[str]:
    """Names the difference of two values; none where they are equal."""
    if old == new:
        return []
    return [f"{what}: recorded {short(old)}, replayed {short(new)}"]


def first_difference(what: str, old: Sequence[float], new: Sequence[float]) -> list[str]:
    """Names the first place at which two lists differ."""
    for place, (old_value, new_value) in enumerate(zip(old, new, strict=False)):
        if old_value != new_value:
            return difference(f"{what}[{place}]", old_value, new_value)
    return difference(f"{what}, length", len(old), len(new))


def short(value: Any) -> str:
    """Writes a value in at most MAX_CHARS characters, a single message as its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content", value[0])
    text = repr(value)
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}…"
