"""How gymnasium's games are told: rules, names of actions and observations, pictures whose columns stay aligned.

Invariant: a legend says what the game that it was made for does (its map, its rewards, its slipping); what is not
written down here by hand comes from the docstring of the environment's class.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# As in gymnasium's own documentation.
COUNTING = "your cell is in brackets. Rows count from 0 at the top, columns from 0 at the left."


@dataclass(frozen=True)
class Legend:
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


def _frozen_lake(env: Any) -> Legend:
    letters = _letters(env.desc)
    flat = "".join("".join(row) for row in letters)
    pay = {
        flat[after]: reward
        for state, moves in env.P.items()
        if flat[state] not in "GH"
        for outcomes in moves.values()
        for _, after, reward, _ in outcomes
    }
    goal = (
        "Cross the frozen lake to the goal G without falling into a hole H. The map: S start, F ice, H hole, G goal; "
        f"{COUNTING}\nThe game ends at G or in H: reaching G pays {pay.get('G', 0):g}, falling into H "
        f"{pay.get('H', 0):g}, any other move {pay.get('F', 0):g}.{_slipping(env)}"
    )
    return Legend(goal, ("left", "down", "right", "up"), show=lambda env: _grid(letters, int(env.s)))


def _cliff_walking(env: Any) -> Legend:
    letters = [["C" if cliff else "o" for cliff in row] for row in env._cliff.tolist()]
    letters[-1][0], letters[-1][-1] = "S", "T"
    goal = (
        "Walk to the target T without stepping on the cliff C. The map: S start, o ground, C cliff, T target; "
        f"{COUNTING}\nEvery step pays -1. A step onto C pays -100 and puts you back on S. The game ends at T."
        f"{_slipping(env)}"
    )
    return Legend(goal, ("up", "right", "down", "left"), show=lambda env: _grid(letters, int(env.s)))


def _taxi(env: Any) -> Legend:
    goal = (
        "Drive the taxi to the passenger, pick up, drive to the destination, drop off. The map: R, G, Y, B stops; "
        "T taxi; P passenger (TP: in the taxi); D destination; | wall, : no wall. Rows count from 0 at the top, "
        "columns from 0 at the left.\nSouth is down, north up, east right, west left; a wall stops the taxi. Every "
        "action pays -1; a pickup or dropoff that is not possible -10; delivering the passenger pays 20 and ends the "
        "game."
    )
    straight = env.P[0][0][0][0]
    if straight < 1:
        goal += f" It rains: {straight:.0%} of moves go where you steer, the others to a side."
    if env.fickle_passenger:
        goal += " The passenger may change the destination at the first move after getting in."
    return Legend(goal, ("south", "north", "east", "west", "pickup", "dropoff"), show=_taxi_picture)


def _taxi_picture(env: Any) -> str:
    row, column, passenger, target = env.decode(env.s)
    stops = dict(zip(env.locs, "RGYB", strict=True))
    places = [f"{letter} (row {at[0]}, column {at[1]})" for at, letter in stops.items()]
    waiting, goal = env.locs[passenger] if passenger < len(env.locs) else None, env.locs[target]

    def cell(at: tuple[int, int]) -> str:
        taxi = ("T" if waiting else "TP") if at == (row, column) else ""
        return stops.get(at, "") + "P" * (at == waiting) + "D" * (at == goal) + taxi

    walls = _letters(env.desc)
    lines = [
        "|" + "".join(cell((y, x)).ljust(4) + walls[y + 1][2 * x + 2] for x in range(env.max_col + 1))
        for y in range(env.max_row + 1)
    ]
    border = "+" + "-" * (len(lines[0]) - 2) + "+"
    where = f"is at {places[passenger]}" if waiting else "is in the taxi"
    said = f"The taxi is at row {row}, column {column}. The passenger {where}. The destination is {places[target]}."
    return "\n".join([said, border, *lines, border])


def _blackjack(env: Any) -> Legend:
    goal = (
        "Get closer to 21 than the dealer, but not over it. hit: take another card; over 21 you lose at once. stick: "
        "take no more; the dealer draws up to 17 or more and loses over 21, else the closer to 21 wins. Number cards "
        "count their number, jack, queen and king 10, an ace 11 if that does not take you over 21, else 1. Your usable "
        "ace: 1 if you have an ace that counts 11, else 0. The dealer's card is the one you see; 1 is an ace.\n"
        "A win pays 1, a loss -1, a draw 0."
    )
    if env.sab:
        goal += " An ace and a ten as your first two cards beat any other 21 of the dealer's."
    elif env.natural:
        goal += " A win with an ace and a ten as your first two cards pays 1.5."
    return Legend(goal, ("stick", "hit"), ("your sum", "the dealer's card", "usable ace"))


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


def _slipping(env: Any) -> str:
    """Explains edges, and slipping from the transition table, where it makes the move the middle one of three."""
    outcomes = max((outcomes for moves in env.P.values() for outcomes in moves.values()), key=len)
    chance = outcomes[len(outcomes) // 2][0]
    often = "only one time in three" if math.isclose(chance, 1 / 3) else f"{chance:.0%} of the time"
    slips = f" It is slippery: you move as you wish {often}, else at a right angle to that, to either side."
    return " At the edge you stay where you are." + (slips if len(outcomes) > 1 else "")


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
