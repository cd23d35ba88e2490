"""gymnasium's environments as games of text, told to a player who reads.

Invariant: an environment whose actions or observations cannot be written down is refused when it is made.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from custom.adapters.base import Adapter, Step, import_library

# An observation of more numbers is not written as text.
LARGEST_BOX = 64


@dataclasses.dataclass(frozen=True)
class Legend:
    """Says how a gymnasium environment is told to a player who reads."""

    goal: str
    actions: tuple[str, ...]
    observations: tuple[str, ...] = ()


LEGENDS = {
    "FrozenLake": Legend(
        "Walk over the frozen lake from S to the goal G; F is ice, H a hole. The cell in brackets is yours.",
        ("left", "down", "right", "up"),
    ),
    "CliffWalking": Legend(
        "Walk from x, your place, to the target T without stepping on the cliff C; every step costs 1.",
        ("up", "right", "down", "left"),
    ),
    "Taxi": Legend(
        "Drive the taxi, the cell in brackets, to the passenger (blue), pick up, drive to the goal (magenta), "
        "drop off.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "Blackjack": Legend(
        "Come closer to 21 than the dealer, but not over it. An ace is usable while it counts 11.",
        ("stick", "hit"),
        ("your sum", "the dealer's card", "usable ace"),
    ),
}


class GymnasiumEnvironment(Adapter):
    """Plays `gymnasium:ID`, with discrete or text actions and an observation that can be written down.

    Args:
        identifier: such as "FrozenLake-v1".
        prompt_template: fields {name}, {goal}, {observation}, {actions}.
        action_names: names of the actions in order, or name -> number; numbers are always understood, too.
        observation_names: names of the parts of a Tuple observation.
        goal: what the player is told to do; known for gymnasium's own text games, as are the names.
        invalid_reward: reward of an answer in which no action is found; the game does not move then.
        kwargs: go to gymnasium.make. Without a render_mode the environment's own text picture is the observation,
            where it has one ("ansi").
    An answer's last action counts, so that a model may think aloud before it: "not left, I go right" is right.
    """

    TEMPLATE = "{goal}\n{observation}\nActions: {actions}. Answer with one of them."

    def __init__(
        self,
        identifier: str,
        *,
        prompt_template: str = TEMPLATE,
        action_names: Sequence[str] | Mapping[str, int] | None = None,
        observation_names: Sequence[str] | None = None,
        goal: str | None = None,
        invalid_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, prompt_template)
        self.game = _make_gymnasium(identifier, kwargs)
        legend = LEGENDS.get(identifier.split("-")[0], Legend(f"Play {identifier}.", ()))
        self.goal = legend.goal if goal is None else goal
        self.observation_names = list(legend.observations if observation_names is None else observation_names)
        self.actions = _action_numbers(self.game, legend.actions if action_names is None else action_names)
        self.invalid_reward = invalid_reward
        space_to_text(self.game.observation_space, self.game.observation_space.sample(), self.observation_names)

    def reset(self, seed: int | None = None) -> str:
        """Starts a new game and returns the prompt around its first observation."""
        observation, _ = self.game.reset(seed=seed)
        self._done = False
        return self.fill_prompt(goal=self.goal, observation=self._show(observation), actions=self._action_list())

    def step(self, action: str) -> Step:
        """Plays the last action that the text names."""
        if self._done:
            return "The game is over.", 0.0, True, {"valid": False}
        choice = self.read_action(action)
        if choice is None:
            hint = f"I found no action in your answer. The actions are: {self._action_list()}."
            return hint, self.invalid_reward, False, {"valid": False}
        observation, reward, terminated, truncated, _ = self.game.step(choice)
        self._done = bool(terminated or truncated)
        return self._show(observation), float(reward), self._done, {"valid": True}

    def read_action(self, text: str) -> int | str | None:
        """Returns the last action that the text names, or the text where actions are text; None where there is none."""
        if not self.actions:
            choice = text.strip()[: self.game.action_space.max_length]
            return choice if self.game.action_space.contains(choice) else None
        names = sorted(self.actions, key=len, reverse=True)
        found = re.findall(r"(?<![\w.-])(?:" + "|".join(map(re.escape, names)) + r")(?![\w-]|\.\d)", text.lower())
        return self.actions[found[-1]] if found else None

    def close(self) -> None:
        """Closes the game."""
        super().close()
        self.game.close()

    def _show(self, observation: Any) -> str:
        if self.game.render_mode == "ansi":
            return plain_picture(str(self.game.render()))
        return space_to_text(self.game.observation_space, observation, self.observation_names)

    def _action_list(self) -> str:
        if not self.actions:
            return "any text"
        names = {number: name for name, number in self.actions.items() if name != str(number)}
        numbers = sorted(set(self.actions.values()))
        if len(numbers) > 20 and not names:
            return f"a number from {numbers[0]} to {numbers[-1]}"
        return ", ".join(f"{number} ({names[number]})" if number in names else str(number) for number in numbers)


def _make_gymnasium(identifier: str, kwargs: Mapping[str, Any]) -> Any:
    gymnasium = import_library("gymnasium", identifier)

    def make(**further: Any) -> Any:
        try:
            return gymnasium.make(identifier, disable_env_checker=True, **kwargs, **further)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"gymnasium:{identifier} cannot be made with {dict(kwargs)}: {error}") from error

    game = make()
    if "render_mode" not in kwargs and "ansi" in game.metadata.get("render_modes", ()):
        game.close()
        game = make(render_mode="ansi")
    return game


def _action_numbers(game: Any, names: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Maps what the player may write, in lower case, to the action's number; empty where actions are text."""
    from gymnasium.spaces import Discrete, Text

    space = game.action_space
    if isinstance(space, Text):
        return {}
    if not isinstance(space, Discrete):
        raise ValueError(f"gymnasium:{game.spec.id} has the action space {space}; allowed: Discrete or Text")
    numbers = range(int(space.start), int(space.start + space.n))
    by_name = dict(names) if isinstance(names, Mapping) else dict(zip(names, numbers, strict=False))
    if len(by_name) != len(names) or not set(by_name.values()) <= set(numbers):
        raise ValueError(
            f"gymnasium:{game.spec.id}: action_names={names!r}; allowed: different names, one for each of the numbers "
            f"{numbers[0]} to {numbers[-1]}"
        )
    return {str(number): number for number in numbers} | {name.lower(): number for name, number in by_name.items()}


def space_to_text(space: Any, value: Any, names: Sequence[str] = ()) -> str:
    """Writes an observation of a gymnasium space as text; ValueError for what cannot be written, such as images."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, spaces.Tuple):
        parts = [space_to_text(part, entry) for part, entry in zip(space.spaces, value, strict=True)]
        named = [f"{name}: {part}" for name, part in zip(names, parts, strict=False)]
        return ", ".join(named + parts[len(named) :])
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {space_to_text(part, value[key])}" for key, part in space.spaces.items())
    countable = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
    if countable and int(np.prod(space.shape)) <= LARGEST_BOX:
        return np.array2string(np.asarray(value), precision=3, suppress_small=True, separator=", ", max_line_width=200)
    raise ValueError(
        f"observations of {space} cannot be written down; allowed: Discrete, Text, Tuple, Dict and up to "
        f"{LARGEST_BOX} numbers. Wrap the game in an environment of your own that describes them"
    )


def plain_picture(picture: str) -> str:
    """Writes a terminal's colours as text: a highlighted X is [X], a coloured one X(blue)."""
    colours = dict(enumerate(("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white"), start=30))

    def write(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        if any(40 <= code < 48 for code in codes):
            return f"[{match[2]}]"
        colour = next((colours[code] for code in codes if code in colours), None)
        return f"{match[2]}({colour})" if colour else match[2]

    painted = re.sub(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", write, picture, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", painted).strip("\n")
