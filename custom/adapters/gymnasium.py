"""gymnasium's environments as games of text, told to a player who reads.

A legend tells a game: rules, names of actions and observations, pictures whose columns stay aligned. What is not
written by hand in gymnasium_legends.yaml comes from the docstring of the environment's class. Invariant: a legend says
what the game that it was made for does (its map, its rewards, its slipping), and an environment whose actions or
observations cannot be written down is refused when it is made.
"""

import inspect
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from jinja2 import Template

from custom.adapters.base import Adapter, Step
from custom.env import OwnGenerators
from data.texts import say, table

# An observation of more numbers is not written as text.
LARGEST_BOX = 64
# How long random play looks for the worst reward: steps, and seconds of this thread's own computing.
TRIAL_STEPS, TRIAL_SECONDS = 300, 0.2


class GymnasiumEnvironment(Adapter):
    """Plays `gymnasium:ID`, with discrete or text actions and an observation that can be written down.

    Args:
        identifier: such as "FrozenLake-v1".
        prompt_template: fields {name}, {goal}, {observation}, {actions}.
        action_names: names of the actions in order; numbers are always understood, too.
        observation_names: names of the parts of an observation that is a Tuple or a row of numbers.
        goal: what the player is told to do; without it the rules of the game, written for gymnasium's own text games
            and otherwise taken from the environment's docstring, as are the names.
        invalid_reward: reward of an answer in which no action is found; the game does not move then. None: the worst
            that a step of this game can pay, if that is below 0, else 0 (`worst_reward`).
        kwargs: go to gymnasium.make. Without a render_mode a text picture is the observation, where the environment
            has one ("ansi").
    An answer's last action counts, so that a model may think aloud before it: "not left, I go right" is right.
    """

    TEMPLATE = "{goal}\n\n{observation}\n\nActions: {actions}. Answer with one of them."

    def __init__(
        self,
        identifier: str,
        *,
        action_names: Sequence[str] | None = None,
        observation_names: Sequence[str] | None = None,
        goal: str | None = None,
        invalid_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, kwargs)
        self.game, self.invalid_reward = _make_gymnasium(identifier, self.settings), invalid_reward
        self.max_turns = self.game.spec.max_episode_steps
        told, actions, observations, self.picture = legend_of(self.game)
        limit = (
            f" The game ends after {self.max_turns} actions at the latest."
            if self.max_turns
            else ""
        )
        self.goal = told + limit if goal is None else goal
        self.observation_names = list(
            observations if observation_names is None else observation_names
        )
        self.names, self.actions = _action_names(
            self.game, actions if action_names is None else action_names
        )
        space_to_text(
            self.game.observation_space,
            self.game.observation_space.sample(),
            self.observation_names,
        )

    def start(self, seed: int) -> str:
        """Starts a new game and returns the prompt around its first observation."""
        observation, _ = self.game.reset(seed=seed)
        return self.fill_prompt(
            goal=self.goal, observation=self._show(observation), actions=self._action_list()
        )

    def play(self, action: str) -> Step:
        """Plays the last action that the text names."""
        choice = self.read_action(action)
        if choice is None:
            if self.invalid_reward is None:
                self.invalid_reward = worst_reward(self.game, self.name, self.settings)
            hint = f"I found no action in your answer. The actions are: {self._action_list()}."
            return hint, self.invalid_reward, False, {"valid": False}
        observation, reward, terminated, truncated, _ = self.game.step(choice)
        return (
            self._show(observation),
            float(reward),
            bool(terminated or truncated),
            {"valid": True},
        )

    def read_action(self, text: str) -> int | str | None:
        """Returns the last action that the text names, or the text where actions are text; None where there is none."""
        if not self.actions:
            choice = text.strip()[: self.game.action_space.max_length]
            return choice if self.game.action_space.contains(choice) else None
        names = sorted(self.actions, key=len, reverse=True)
        found = re.findall(
            r"(?<![\w.-])(?:" + "|".join(map(re.escape, names)) + r")(?![\w-]|\.\d)", text.lower()
        )
        return self.actions[found[-1]] if found else None

    def sample_action(self, generator: random.Random) -> str:
        """Returns the name of an action drawn at random, its number where it has none, or a text."""
        if self.names:
            number = generator.choice(list(self.names))
            return self.names[number] or str(number)
        # The space's own generator has no part in the episode.
        self.game.action_space.seed(generator.randrange(2**31))
        return str(self.game.action_space.sample())

    def _show(self, observation: Any) -> str:
        if self.picture:
            return self.picture(self.game.unwrapped)
        if self.game.render_mode == "ansi":
            # A terminal's colours mark where the player stands: what has one stands in brackets.
            picture = re.sub(r"\x1b\[[1-9][\d;]*m(.+?)\x1b\[0?m", r"[\1]", str(self.game.render()))
            return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", picture).strip("\n")
        return space_to_text(self.game.observation_space, observation, self.observation_names)

    def _action_list(self) -> str:
        if not self.names:
            return "any text"
        if len(self.names) > 20 and not any(self.names.values()):
            return f"a number from {min(self.names)} to {max(self.names)}"
        return ", ".join(
            f"{number} ({name})" if name else str(number) for number, name in self.names.items()
        )


def _make_gymnasium(identifier: str, kwargs: Mapping[str, Any]) -> Any:
    import gymnasium

    game = gymnasium.make(identifier, disable_env_checker=True, **kwargs)
    if "render_mode" in kwargs or "ansi" not in game.metadata.get("render_modes", ()):
        return game
    game.close()
    return _make_gymnasium(identifier, {**kwargs, "render_mode": "ansi"})


def worst_reward(game: Any, identifier: str, kwargs: Mapping[str, Any]) -> float:
    """Returns the worst reward that a step can pay, at most 0: what makes no answer at all no way out.

    It is read from the transition table where the game has one (`P`, gymnasium's toy texts), else it is the worst of
    some random episodes of a second game like this one; -1 where those cannot be played.
    """
    table = getattr(game.unwrapped, "P", None)
    try:
        if table is not None:
            outcomes = [
                outcome
                for moves in table.values()
                for several in moves.values()
                for outcome in several
            ]
            return min([0.0, *(float(reward) for _, _, reward, _ in outcomes)])
        # The trial draws nothing from generators that the game may use.
        with OwnGenerators(0).installed():
            return min([0.0, *_trial_rewards(_make_gymnasium(identifier, kwargs))])
    # A game may trip over being played at random, or over a second one beside it.
    except Exception:
        return -1.0


def _trial_rewards(game: Any) -> list[float]:
    from gymnasium.wrappers import Autoreset

    game, rewards, deadline = Autoreset(game), list[float](), time.thread_time() + TRIAL_SECONDS
    game.reset(seed=0)
    game.action_space.seed(0)
    while len(rewards) < TRIAL_STEPS and time.thread_time() < deadline:
        rewards.append(float(game.step(game.action_space.sample())[1]))
    game.close()
    return rewards


def _action_names(game: Any, given: Sequence[str]) -> tuple[dict[int, str], dict[str, int]]:
    """Returns what each number is called ("": nothing), and the number of each thing that the player may write.

    Both are empty where actions are text.
    """
    from gymnasium import spaces

    space = game.action_space
    if isinstance(space, spaces.Text):
        return {}, {}
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"it has the action space {space}; allowed: Discrete or Text")
    numbers = range(int(space.start), int(space.start + space.n))
    by_name = {str(name).lower(): number for name, number in zip(given, numbers, strict=False)}
    if len(by_name) != len(given):
        raise ValueError(say("action_names", given=given, first=numbers[0], last=numbers[-1]))
    names = dict.fromkeys(numbers, "") | {number: name for name, number in by_name.items()}
    return names, {str(number): number for number in numbers} | by_name


def space_to_text(space: Any, value: Any, names: Sequence[str] = ()) -> str:
    """Writes an observation of a gymnasium space as text; ValueError for what cannot be written, such as images.

    `names` are those of the parts of a Tuple or of a row of numbers: "position: 0.5, velocity: -0.07".
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Tuple):
        return _named(
            [space_to_text(part, entry) for part, entry in zip(space.spaces, value, strict=True)],
            names,
        )
    if isinstance(space, spaces.Dict):
        return "\n".join(
            f"{key}: {space_to_text(part, value[key])}" for key, part in space.spaces.items()
        )
    countable = isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    )
    if countable and int(np.prod(space.shape)) <= LARGEST_BOX:
        numbers = np.asarray(value)
        if names and numbers.ndim == 1:
            return _named([_number(number) for number in numbers], names)
        return np.array2string(
            numbers, formatter={"all": _number}, separator=", ", max_line_width=200
        )
    raise ValueError(say("not_written_down", space=space, most=LARGEST_BOX))


def _named(parts: list[str], names: Sequence[str]) -> str:
    """Writes a name before each part, as far as there are names."""
    return ", ".join(
        [f"{name}: {part}" for name, part in zip(names, parts, strict=False)] + parts[len(names) :]
    )


def _number(number: Any) -> str:
    """Writes a number with two decimals, one between -1 and 1 with four, and no zeros at the end."""
    # Adding 0 makes -0 a 0.
    return f"{round(float(number), 4 if abs(number) < 1 else 2) + 0.0:.15g}"


_TOLD: dict[str, Any] = table(__file__, "gymnasium_legends")


# How a game is told to a player who reads: its rules (what to do, what the signs of a picture mean, what an action
# pays), the names of actions and of observations in order, and what draws where the unwrapped environment stands (None:
# its observation is written as it is).
Legend: TypeAlias = tuple[str, Sequence[str], Sequence[str], Callable[[Any], str] | None]


def legend_of(game: Any) -> Legend:
    """Returns the legend of a game that gymnasium.make has made."""
    env = game.unwrapped
    # Who asks for another render_mode than the text picture wants the observation itself.
    has_picture = "ansi" in env.metadata.get("render_modes", ())
    package, _, name = type(env).__module__.rpartition(".")
    by_hand = package == "gymnasium.envs.toy_text" and (
        game.render_mode == "ansi" or not has_picture
    )
    return _told(name, env, SHOW[name]) if by_hand and name in SHOW else docstring_legend(game)


# --- By hand ---


def _told(game: str, env: Any, show: Callable[[Any], str] | None) -> Legend:
    """Fills in what is written of a game in gymnasium_legends.yaml."""
    told = {"observations": [], **_TOLD[game]}
    # Where a move is slippery it is the middle one of three outcomes.
    table = getattr(env, "P", {0: {0: [(1.0,)]}})
    outcomes = max((outcomes for moves in table.values() for outcomes in moves.values()), key=len)
    goal = Template(told["goal"]).render(
        env=env, slips=len(outcomes) > 1, chance=outcomes[len(outcomes) // 2][0]
    )
    return goal, told["actions"], told["observations"], show


def _cliffs(env: Any) -> str:
    signs = [["C" if cliff else "o" for cliff in row] for row in env._cliff.tolist()]
    signs[-1][0], signs[-1][-1] = "S", "T"
    return _grid(signs, int(env.s))


def _lake(env: Any) -> str:
    return _grid(env.desc.astype(str).tolist(), int(env.s))


def _taxi_picture(env: Any) -> str:
    row, column, passenger, target = env.decode(env.s)
    places = [
        f"{letter} (row {y}, column {x})" for letter, (y, x) in zip("RGYB", env.locs, strict=True)
    ]
    waiting = passenger < len(env.locs)
    cells = dict.fromkeys(product(range(5), range(5)), "") | dict(
        zip(env.locs, "RGYB", strict=True)
    )
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
    rows = [
        [f"[{sign}]" if (y, x) == at else f" {sign} " for x, sign in enumerate(row)]
        for y, row in enumerate(signs)
    ]
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
    actions, observations = (
        _names(sections.get(title, "")) for title in ("Action Space", "Observation Space")
    )
    # A list that is not about this game's spaces names nothing.
    fits = len(set(actions)) == len(actions) == getattr(game.action_space, "n", None)
    named = game.observation_space.shape == (len(observations),)
    about, reward = (
        _paragraph(text)
        for text in (sections.get("Description", start), sections.get("Reward", ""))
    )
    goal = f"Play {game.spec.id}. {about}".rstrip() + f"\n{reward}".rstrip()
    return goal, actions if fits else (), observations if named else (), None


def _paragraph(section: str) -> str:
    """Returns the first paragraph on one line, without marks of code, bold type and links."""
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)|`+|\*\*", r"\1", section.strip().partition("\n\n")[0])
    return " ".join(prose.split())


def _names(section: str) -> tuple[str, ...]:
    """Returns what the lines "- 0: Push it" or "| 0 | Push it | …" name."""
    lines = re.findall(r"^(?:[-*] \d+:|\| *\d+ *\|)([^|\n]+)", section, flags=re.MULTILINE)
    return tuple(_paragraph(line).rstrip(".").lower() for line in lines)
