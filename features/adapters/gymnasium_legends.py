"""How gymnasium's games are told to a player who reads: rules, names, and pictures in text.

What is not written by hand in gymnasium_legends.yaml comes from the docstring of the environment's
class. Invariant: a legend says what the game that it was made for does (its map, its rewards, its
slipping), and a picture's columns stay aligned.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from features.adapters.gymnasium_minigrid import draw_view

_TABLE = Path(__file__).with_suffix(".yaml")
# By game: its rules, names of actions and observations, and picture.
BY_HAND: dict[str, dict[str, Any]] = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Legend:
    """Holds how a game is told.

    Attributes:
        goal: what to do, what the signs of a picture mean, what an action pays.
        actions, observations: names of the actions and of the observation's parts, in order.
        picture: draws where the unwrapped environment stands; None: its observation is written as
            it is.
    """

    goal: str
    actions: Sequence[str] = ()
    observations: Sequence[str] = ()
    picture: Callable[[Any], str] | None = None


def legend_of(game: Any) -> Legend:
    """Returns the legend of a game that gymnasium.make has made."""
    env = game.unwrapped
    package, _, name = type(env).__module__.rpartition(".")
    if package.startswith("minigrid.") and hasattr(env, "gen_obs"):
        return replace(docstring_legend(game), picture=draw_view)
    if package != "gymnasium.envs.toy_text" or name not in PICTURES:
        return docstring_legend(game)
    # A user who asks for another render_mode than the text picture wants the observation itself.
    has_picture = "ansi" in env.metadata.get("render_modes", ())
    if has_picture and game.render_mode != "ansi":
        return docstring_legend(game)
    return _legend_by_hand(name, env)


# --- By hand ---


def _legend_by_hand(name: str, env: Any) -> Legend:
    """Fills in what is written of a game in gymnasium_legends.yaml."""
    written = BY_HAND[name]
    chance, slips = _chance_of_moving(env)
    goal = Template(written["goal"]).render(env=env, slips=slips, chance=chance)
    return Legend(
        goal=goal,
        actions=written["actions"],
        observations=written.get("observations", []),
        picture=PICTURES[name],
    )


def _chance_of_moving(env: Any) -> tuple[float, bool]:
    """Returns how likely a move goes where it is meant to, and whether moves slip at all.

    A slippery move has three outcomes in the transition table `P`: state -> action -> [(chance, …)]
    and is the middle one. A game without a table does not slip.
    """
    most_outcomes: list[Any] = [(1.0,)]
    for moves in getattr(env, "P", {}).values():
        for outcomes in moves.values():
            if len(outcomes) > len(most_outcomes):
                most_outcomes = outcomes
    as_meant = most_outcomes[len(most_outcomes) // 2]
    return as_meant[0], len(most_outcomes) > 1


def _draw_cliffs(env: Any) -> str:
    signs = []
    for row in env._cliff.tolist():
        signs.append(["C" if cliff else "o" for cliff in row])
    signs[-1][0] = "S"
    signs[-1][-1] = "T"
    return _draw_map(signs, int(env.s))


def _draw_lake(env: Any) -> str:
    return _draw_map(env.desc.astype(str).tolist(), int(env.s))


def _draw_map(signs: Sequence[Sequence[str]], state: int) -> str:
    """Draws cells three characters wide, the player's in brackets, below a line with its place."""
    row, column = divmod(state, len(signs[0]))
    lines = [f"You are at row {row}, column {column}, on {signs[row][column]}."]
    for y, row_signs in enumerate(signs):
        cells = [f" {sign} " for sign in row_signs]
        if y == row:
            cells[column] = f"[{row_signs[column]}]"
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


def _draw_taxi(env: Any) -> str:
    """Fills in the picture: stops by their letters, P passenger, D destination, T taxi."""
    row, column, passenger, destination = env.decode(env.s)
    stops = list(zip("RGYB", env.locs, strict=True))
    places = [f"{letter} (row {y}, column {x})" for letter, (y, x) in stops]
    # The 25 cells, in the order of the picture's fields.
    cells = dict.fromkeys(product(range(5), range(5)), "")
    for letter, place in stops:
        cells[place] = letter
    if passenger < len(env.locs):
        cells[env.locs[passenger]] += "P"
        taxi = "T"
        where = f"is at {places[passenger]}"
    else:
        taxi = "TP"
        where = "is in the taxi"
    cells[env.locs[destination]] += "D"
    cells[row, column] += taxi
    return BY_HAND["taxi"]["picture"].format(
        *cells.values(), row=row, column=column, passenger=where, destination=places[destination]
    )


# By the module of gymnasium.envs.toy_text.
PICTURES: dict[str, Callable[[Any], str] | None] = {
    "frozen_lake": _draw_lake,
    "cliffwalking": _draw_cliffs,
    "taxi": _draw_taxi,
    "blackjack": None,
}


# --- From a docstring ---


def docstring_legend(game: Any) -> Legend:
    """Makes a legend from the environment's docstring.

    The goal is what its description and its rewards begin with; the names of actions and
    observations are those of numbered lists or tables in gymnasium's sections.
    """
    text = inspect.cleandoc(type(game.unwrapped).__doc__ or "")
    introduction, sections = _split_sections(text)
    description = _first_paragraph(sections.get("Description", introduction))
    reward = _first_paragraph(sections.get("Reward", ""))
    goal = f"Play {game.spec.id}. {description}".rstrip() + f"\n{reward}".rstrip()
    # A list that is not about this game's spaces names nothing.
    actions = _listed_names(sections.get("Action Space", ""))
    count = getattr(game.action_space, "n", None)
    if len(actions) != count or len(set(actions)) != count:
        actions = ()
    observations = _listed_names(sections.get("Observation Space", ""))
    if game.observation_space.shape != (len(observations),):
        observations = ()
    return Legend(goal, actions, observations)


def _split_sections(text: str) -> tuple[str, dict[str, str]]:
    """Returns what comes before the first headline, and the sections by title, in the singular."""
    introduction, *parts = re.split(r"^#{2,} *(.+?)s?:? *$", text, flags=re.MULTILINE)
    titles = parts[::2]
    contents = parts[1::2]
    return introduction, dict(zip(titles, contents, strict=True))


def _first_paragraph(section: str) -> str:
    """Returns the first paragraph on one line, without marks of code, bold type and links."""
    paragraph = section.strip().partition("\n\n")[0]
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)|`+|\*\*", r"\1", paragraph)
    return " ".join(prose.split())


def _listed_names(section: str) -> tuple[str, ...]:
    """Returns what the lines "- 0: Push it" or "| 0 | Push it | …" name."""
    lines = re.findall(r"^(?:[-*] \d+:|\| *\d+ *\|)([^|\n]+)", section, flags=re.MULTILINE)
    return tuple(_first_paragraph(line).rstrip(".").lower() for line in lines)
