"""How gymnasium's games are told: rules, names of actions and observations, pictures whose columns stay aligned.

Invariant: a legend says what the game that it was made for does (its map, its rewards, its slipping); what is not
written down here by hand comes from the docstring of the environment's class.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# As in gymnasium's own documentation.
COUNTING = "your cell is in brackets. Rows count from 0 at the top, columns from 0 at the left."
# Sentences of a docstring that tell a player nothing: literature, other versions, arguments, data types.
UNHELPFUL = re.compile(
    r"https?:|\bversions?\b|described (by|in)|(based|appeared|adapted) (in|on|from)\b|\bGif\b|ndarray|int\(\)|=True|"
    r"=False|threshold|parameter|argument|^Truncation|^The length of the episode|gymnasium|trajectory optim|"
    r"Pontryagin|the reason|ranges above|Particularly|run:$",
    re.IGNORECASE,
)


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
    row, column, passenger, destination = env.decode(env.s)
    stops = dict(zip(env.locs, "RGYB", strict=True))
    places = [f"{letter} (row {at[0]}, column {at[1]})" for at, letter in stops.items()]
    waiting, goal = env.locs[passenger] if passenger < len(env.locs) else None, env.locs[destination]

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
    said = (
        f"The taxi is at row {row}, column {column}. The passenger {where}. The destination is {places[destination]}."
    )
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


BY_HAND: dict[str, Callable[[Any], Legend]] = {
    "gymnasium.envs.toy_text.frozen_lake": _frozen_lake,
    "gymnasium.envs.toy_text.cliffwalking": _cliff_walking,
    "gymnasium.envs.toy_text.taxi": _taxi,
    "gymnasium.envs.toy_text.blackjack": _blackjack,
}


def _letters(desc: Any) -> list[list[str]]:
    return [[bytes(letter).decode() for letter in row] for row in desc]


def _grid(letters: Sequence[Sequence[str]], state: int) -> str:
    """Draws a map of cells three characters wide, the player's in brackets, below a line that says where that is."""
    at = divmod(state, len(letters[0]))
    cells = [
        [f"[{sign}]" if (y, x) == at else f" {sign} " for x, sign in enumerate(row)] for y, row in enumerate(letters)
    ]
    lines = ["".join(row).rstrip() for row in cells]
    return "\n".join([f"You are at row {at[0]}, column {at[1]}, on {letters[at[0]][at[1]]}.", *lines])


def _slipping(env: Any) -> str:
    """Explains edges, and slipping from the transition table, where it makes the move the middle one of three."""
    outcomes = max((outcomes for moves in env.P.values() for outcomes in moves.values()), key=len)
    chance = outcomes[len(outcomes) // 2][0]
    often = "only one time in three" if math.isclose(chance, 1 / 3) else f"{chance:.0%} of the time"
    slips = f" It is slippery: you move as you wish {often}, else at a right angle to that, to either side."
    return " At the edge you stay where you are." + (slips if len(outcomes) > 1 else "")


# --- From a docstring ---


def docstring_legend(game: Any) -> Legend:
    """Makes a legend from the environment's docstring with gymnasium's sections, each of which may be missing."""
    text = type(game.unwrapped).__doc__ or ""
    start, *parts = re.split(r"^[ \t]*#{2,}[ \t]*(.+?):?[ \t]*$", text, flags=re.MULTILINE)
    sections = {title.lower(): text for title, text in zip(parts[::2], parts[1::2], strict=True)}

    def section(*titles: str) -> str:
        return next((text for title, text in sections.items() if title.startswith(titles)), "")

    acting, seeing = section("action space"), section("observation space")
    actions = _table(acting) or re.findall(r"^\s*[-*]?\s*\d+:\s*(.+?)\.?\s*$", acting, flags=re.MULTILINE)
    actions = [_plain(name).lower() for name in actions]
    observations = _table(seeing)
    # A table that is not about this game's spaces names nothing.
    fits = len(set(actions)) == len(actions) == getattr(game.action_space, "n", None)
    named = game.observation_space.shape == (len(observations),)
    told = [
        f"Play {game.spec.id}. {_sentences(section('description') or start, 450)}",
        _sentences(seeing, 350),
        _sentences(section("reward"), 450),
        _sentences(section("episode end", "episode term"), 300),
    ]
    goal = "\n".join(part.strip() for part in told if part.strip())
    return Legend(goal, tuple(actions) if fits else (), tuple(observations) if named else ())


def _table(text: str) -> list[str]:
    """Returns the second column of a table whose first one counts 0, 1, 2, …"""
    rows = re.findall(r"^\s*\|\s*(\d+)\s*\|\s*(.+?)\s*\|", text, flags=re.MULTILINE)
    counted = [int(number) for number, _ in rows] == [*range(len(rows))]
    return [_plain(name).lower() for _, name in rows] if counted else []


def _plain(text: str) -> str:
    """Takes markup away: links, code marks, bold, tags."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|</?[a-z][^>]*>", r"\1", text)
    return " ".join(re.sub(r"`+|\*\*+", "", text).split())


def _sentences(section: str, limit: int) -> str:
    """Returns the first sentences that tell a player something, `limit` characters at most."""
    prose = re.sub(r"```.*?(```|\Z)|^\s*\|[^\n]*$", "", section, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^\s*(?:[-*]|\d+[.)])\s+(?:Termination: *)?", "\n\n", prose, flags=re.MULTILINE)
    kept = ""
    for part in re.split(r"\n\s*\n|(?<=[.!?])\s+(?=[A-Z])", prose):
        sentence = _plain(part)
        if " " not in sentence or UNHELPFUL.search(sentence):
            continue
        if len(kept) + len(sentence) > limit:
            break
        kept += sentence + (" " if sentence[-1] in ".!?:;," else "; ")
    return re.sub(r";\s*$", ".", kept).strip()
