"""How gymnasium's games are told: rules, names of actions and observations, pictures whose columns stay aligned.

Invariant: a legend says what the game that it was made for does (its map, its rewards, its slipping); what is not
written by hand in gymnasium_legends.yaml comes from the docstring of the environment's class.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

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
    by_hand = BY_HAND.get(type(env).__module__) if game.render_mode == "ansi" or not has_picture else None
    return by_hand(env) if by_hand else docstring_legend(game)


# --- By hand ---


def _legend(game: str, when: Mapping[str, bool], show: Callable[[Any], str] | None = None, **fields: Any) -> Legend:
    """Fills in what is written of a game in gymnasium_legends.yaml, with the sentences whose `when` holds."""
    told = {"observations": [], **_TOLD[game]}
    goal = " ".join([told["goal"], *(told[name] for name, holds in when.items() if holds)]).format(**fields)
    return Legend(goal, tuple(told["actions"]), tuple(told["observations"]), show)


def _walk(game: str, env: Any, signs: Sequence[Sequence[str]], **pay: float) -> Legend:
    """Tells of a walk on a map, slippery where the transition table makes the move the middle one of three."""
    outcomes = max((outcomes for moves in env.P.values() for outcomes in moves.values()), key=len)
    chance = outcomes[len(outcomes) // 2][0]
    often = "only one time in three" if math.isclose(chance, 1 / 3) else f"{chance:.0%} of the time"
    return _legend(game, {"slips": len(outcomes) > 1}, lambda env: _grid(signs, int(env.s)), often=often, **pay)


def _frozen_lake(env: Any) -> Legend:
    letters = _letters(env.desc)
    flat = "".join("".join(row) for row in letters)
    moves = [moves for state, moves in env.P.items() if flat[state] not in "GH"]
    outcomes = [outcome for by_action in moves for several in by_action.values() for outcome in several]
    pay = {flat[after]: reward for _, after, reward, _ in outcomes}
    return _walk("frozen_lake", env, letters, **dict.fromkeys("FGH", 0) | pay)


def _cliff_walking(env: Any) -> Legend:
    letters = [["C" if cliff else "o" for cliff in row] for row in env._cliff.tolist()]
    letters[-1][0], letters[-1][-1] = "S", "T"
    return _walk("cliffwalking", env, letters)


def _taxi(env: Any) -> Legend:
    straight = env.P[0][0][0][0]
    return _legend("taxi", {"rain": straight < 1, "fickle": env.fickle_passenger}, _taxi_picture, straight=straight)


def _blackjack(env: Any) -> Legend:
    return _legend("blackjack", {"any_other_21": env.sab, "pays_more": env.natural and not env.sab})


def _taxi_picture(env: Any) -> str:
    row, column, passenger, target = env.decode(env.s)
    stops = dict(zip(env.locs, "RGYB", strict=True))
    places = [f"{letter} (row {at[0]}, column {at[1]})" for at, letter in stops.items()]
    waiting, goal = env.locs[passenger] if passenger < len(env.locs) else None, env.locs[target]

    def cell(at: tuple[int, int]) -> str:
        taxi = ("T" if waiting else "TP") if at == (row, column) else ""
        return stops.get(at, "") + "P" * (at == waiting) + "D" * (at == goal) + taxi

    walls = _letters(env.desc)
    height, width = env.max_row + 1, env.max_col + 1
    rows = [[cell((y, x)).ljust(4) + walls[y + 1][2 * x + 2] for x in range(width)] for y in range(height)]
    lines = ["|" + "".join(row) for row in rows]
    border = "+" + "-" * (len(lines[0]) - 2) + "+"
    where = f"is at {places[passenger]}" if waiting else "is in the taxi"
    said = f"The taxi is at row {row}, column {column}. The passenger {where}. The destination is {places[target]}."
    return "\n".join([said, border, *lines, border])


TOY_TEXTS = {"frozen_lake": _frozen_lake, "cliffwalking": _cliff_walking, "taxi": _taxi, "blackjack": _blackjack}
BY_HAND = {f"gymnasium.envs.toy_text.{module}": legend for module, legend in TOY_TEXTS.items()}


def _letters(desc: Any) -> list[list[str]]:
    return [[bytes(letter).decode() for letter in row] for row in desc]


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
