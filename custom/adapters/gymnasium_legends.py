"""How gymnasium's games are told: rules, names of actions and observations, pictures whose columns stay aligned.

Invariant: a legend says what the game that it was made for does (its map, its rewards, its slipping); what is not
written by hand in gymnasium_legends.yaml comes from the docstring of the environment's class.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Template

_TOLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Legend(NamedTuple):
    """Says how a game is told to a player who reads.

    Attributes:
        goal: the rules: what to do, what the signs of a picture mean, what an action pays.
        actions, observations: names in order.
        show: writes where the unwrapped environment stands; None: its observation is written as it is.
    """

    goal: str
    actions: tuple[str, ...] = ()
    observations: tuple[str, ...] = ()
    show: Callable[[Any], str] | None = None


def legend_of(game: Any) -> Legend:
    """Returns the legend of a game that gymnasium.make has made."""
    env = game.unwrapped
    # Who asks for another render_mode than the text picture wants the observation itself.
    has_picture = "ansi" in env.metadata.get("render_modes", ())
    package, _, name = type(env).__module__.rpartition(".")
    by_hand = package == "gymnasium.envs.toy_text" and (game.render_mode == "ansi" or not has_picture)
    return _told(name, env, SHOW[name]) if by_hand and name in SHOW else docstring_legend(game)


# --- By hand ---


def _told(game: str, env: Any, show: Callable[[Any], str] | None) -> Legend:
    """Fills in what is written of a game in gymnasium_legends.yaml."""
    told = {"observations": [], **_TOLD[game]}
    # Where a move is slippery it is the middle one of three outcomes.
    table = getattr(env, "P", {0: {0: [(1.0,)]}})
    outcomes = max((outcomes for moves in table.values() for outcomes in moves.values()), key=len)
    goal = Template(told["goal"]).render(env=env, slips=len(outcomes) > 1, chance=outcomes[len(outcomes) // 2][0])
    return Legend(goal, tuple(told["actions"]), tuple(told["observations"]), show)


def _cliffs(env: Any) -> str:
    signs = [["C" if cliff else "o" for cliff in row] for row in env._cliff.tolist()]
    signs[-1][0], signs[-1][-1] = "S", "T"
    return _grid(signs, int(env.s))


def _lake(env: Any) -> str:
    return _grid(env.desc.astype(str).tolist(), int(env.s))


def _taxi_picture(env: Any) -> str:
    row, column, passenger, target = env.decode(env.s)
    places = [f"{letter} (row {y}, column {x})" for letter, (y, x) in zip("RGYB", env.locs, strict=True)]
    waiting = passenger < len(env.locs)
    cells = dict.fromkeys(product(range(5), range(5)), "") | dict(zip(env.locs, "RGYB", strict=True))
    if waiting:
        cells[env.locs[passenger]] += "P"
    cells[env.locs[target]] += "D"
    cells[row, column] += "T" if waiting else "TP"
    where = f"is at {places[passenger]}" if waiting else "is in the taxi"
    at = {"row": row, "column": column, "passenger": where, "destination": places[target]}
    return _TOLD["taxi"]["picture"].format(*cells.values(), **at)


SHOW = {"frozen_lake": _lake, "cliffwalking": _cliffs, "taxi": _taxi_picture, "blackjack": None}


def _grid(signs: Sequence[Sequence[str]], state: int) -> str:
    """Draws a map of cells three characters wide, the player's in brackets, below a line that says where that is."""
    at = divmod(state, len(signs[0]))
    rows = [[f"[{sign}]" if (y, x) == at else f" {sign} " for x, sign in enumerate(row)] for y, row in enumerate(signs)]
    lines = ["".join(row).rstrip() for row in rows]
    return "\n".join([f"You are at row {at[0]}, column {at[1]}, on {signs[at[0]][at[1]]}.", *lines])


# --- From a docstring ---


def docstring_legend(game: Any) -> Legend:
    """Makes a legend from the environment's docstring: what its description and its rewards begin with, and names.

    The names of actions and observations are those of numbered lists or tables in gymnasium's sections.
    """
    text = inspect.cleandoc(type(game.unwrapped).__doc__ or "")
    start, *parts = re.split(r"^#{2,} *(.+?)s?:? *$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    actions, observations = (_names(sections.get(title, "")) for title in ("Action Space", "Observation Space"))
    # A list that is not about this game's spaces names nothing.
    fits = len(set(actions)) == len(actions) == getattr(game.action_space, "n", None)
    named = game.observation_space.shape == (len(observations),)
    about, reward = (_paragraph(text) for text in (sections.get("Description", start), sections.get("Reward", "")))
    goal = f"Play {game.spec.id}. {about}".rstrip() + f"\n{reward}".rstrip()
    return Legend(goal, actions if fits else (), observations if named else ())


def _paragraph(section: str) -> str:
    """Returns the first paragraph on one line, without marks of code, bold type and links."""
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)|`+|\*\*", r"\1", section.strip().partition("\n\n")[0])
    return " ".join(prose.split())


def _names(section: str) -> tuple[str, ...]:
    """Returns what the lines "- 0: Push it" or "| 0 | Push it | …" name."""
    lines = re.findall(r"^(?:[-*] \d+:|\| *\d+ *\|)([^|\n]+)", section, flags=re.MULTILINE)
    return tuple(_paragraph(line).rstrip(".").lower() for line in lines)
