"""From the name in a config to an environment: classes of ours, of a user's file, and adapters of three libraries.

An adapter's first observation is its prompt template, filled: a str.format template that `prompt_template` replaces.
What an adapter cannot read as an action is answered by an observation that says so, never by an exception.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from custom.env import BaseEnvironment, OwnGenerators
from custom.reward_score import extract_answer
from data.loading import load_extern_object

Step = tuple[str, float, bool, dict[str, Any]]
LARGEST_BOX = 64  # numbers that an observation may have to be shown as text


def make_environment(source: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """An environment from its description.

    Args:
        source: "gymnasium:ID", "reasoning_gym:NAME", "textarena:ID", "package.module:Class", "/path/file.py:Class", a
            class, or a function that returns an environment.
        kwargs: arguments by name; for a class that is built from a config alone, the fields of its `config_cls`.
    Raises: ValueError for what does not exist, and for arguments that it does not take.
    """
    kwargs = dict(kwargs or {})
    if not isinstance(source, str):
        return _construct(source, kwargs)
    kind, _, name = source.rpartition(":")
    if not kind or not name:
        raise ValueError(
            f"environment {source!r} is unknown; allowed: gymnasium:ID, reasoning_gym:NAME, textarena:ID, "
            "package.module:Class or /path/to/file.py:Class"
        )
    if is_adapter(source):
        library, _, identifier = source.partition(":")
        return ADAPTERS[library](identifier, **kwargs)
    return _construct(_load_class(kind, name), kwargs)


def is_adapter(source: Any) -> bool:
    """Whether the description names an environment of one of the libraries."""
    return isinstance(source, str) and source.partition(":")[0] in ADAPTERS


def fill_template(template: str, fields: Mapping[str, str], setting: str) -> str:
    """`template.format(**fields)`; ValueError names the fields there are."""
    try:
        return template.format(**fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{setting}={template!r} cannot be filled ({error!r}); its fields: "
            f"{', '.join(f'{{{name}}}' for name in fields)}. Write {{{{ and }}}} for braces"
        ) from error


def _load_class(place: str, name: str) -> Any:
    if place.endswith(".py"):
        return load_extern_object(place, name)
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"environment {place}:{name}: there is no module {error.name!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"environment {place}:{name}: the module does not define {name!r}")
    return getattr(module, name)


def _construct(make: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(make):
        raise ValueError(f"an environment is made from a class or a function, not from a {type(make).__name__}")
    if not kwargs:
        return make()
    if isinstance(make, type) and list(inspect.signature(make).parameters) == ["config"] and "config" not in kwargs:
        allowed = [f.name for f in dataclasses.fields(make.config_cls)]  # type: ignore[attr-defined]
        if unknown := sorted(kwargs.keys() - set(allowed)):
            raise ValueError(f"{make.__name__} takes no {unknown}; allowed: {', '.join(allowed) or 'nothing'}")
        return make(make.config_cls(**kwargs))  # type: ignore[attr-defined]
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{make.__name__} cannot be called with {sorted(kwargs)}: {error}") from error
    return make(**kwargs)


class _Adapter(BaseEnvironment):
    """What the three have in common: a name and a prompt template."""

    def __init__(self, name: str, prompt_template: str) -> None:
        super().__init__()
        self.name, self.prompt_template = name, prompt_template

    def _prompt(self, **fields: str) -> str:
        return fill_template(self.prompt_template, {"name": self.name, **fields}, "prompt_template")


@dataclasses.dataclass(frozen=True)
class Legend:
    """How a gymnasium environment is told to a player who reads."""

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
        "Drive the taxi, the cell in brackets, to the passenger (blue), pick up, drive to the goal (magenta), drop off.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "Blackjack": Legend(
        "Come closer to 21 than the dealer, but not over it. An ace is usable while it counts 11.",
        ("stick", "hit"),
        ("your sum", "the dealer's card", "usable ace"),
    ),
}


class GymnasiumEnvironment(_Adapter):
    """`gymnasium:ID`, with discrete or text actions and an observation that can be written down.

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
        """A new game; the prompt around its first observation."""
        observation, _ = self.game.reset(seed=seed)
        self._done = False
        return self._prompt(goal=self.goal, observation=self._show(observation), actions=self._action_list())

    def step(self, action: str) -> Step:
        """Plays the last action that the text names."""
        if self._done:
            return "The game is over.", 0.0, True, {"valid": False}
        choice = self._read(action)
        if choice is None:
            hint = f"I found no action in your answer. The actions are: {self._action_list()}."
            return hint, self.invalid_reward, False, {"valid": False}
        observation, reward, terminated, truncated, _ = self.game.step(choice)
        self._done = bool(terminated or truncated)
        return self._show(observation), float(reward), self._done, {"valid": True}

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

    def _read(self, text: str) -> int | str | None:
        if not self.actions:
            choice = text.strip()[: self.game.action_space.max_length]
            return choice if self.game.action_space.contains(choice) else None
        names = sorted(self.actions, key=len, reverse=True)
        found = re.findall(r"(?<![\w.-])(?:" + "|".join(map(re.escape, names)) + r")(?![\w-]|\.\d)", text.lower())
        return self.actions[found[-1]] if found else None


def _make_gymnasium(identifier: str, kwargs: Mapping[str, Any]) -> Any:
    gymnasium = _library("gymnasium", f"gymnasium:{identifier}", "gymnasium")

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
    """What the player may write -> the action's number, in lower case; empty for an environment that takes text."""
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
    """An observation of a gymnasium space as text; ValueError for spaces that are no reading matter, such as images."""
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
    """A terminal's colours as text: a highlighted X is [X], a coloured one X(blue)."""
    colours = dict(
        zip(range(30, 38), ["gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white"], strict=True)
    )

    def write(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        if any(40 <= code < 48 for code in codes):
            return f"[{match[2]}]"
        colour = next((colours[code] for code in codes if code in colours), None)
        return f"{match[2]}({colour})" if colour else match[2]

    painted = re.sub(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", write, picture, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", painted).strip("\n")


class ReasoningGymEnvironment(_Adapter):
    """`reasoning_gym:NAME`: a generated task, judged by its own verifier; the seed chooses the task.

    Args:
        identifier: a dataset, such as "chain_sum".
        prompt_template: fields {name}, {question}.
        attempts: answers that may be given; after a wrong one the player is told so, and tries again.
        kwargs: the dataset's own settings, such as min_terms.
    The reward is the verifier's score of the last answer; what of a text is the answer, `extract_answer` says.
    """

    TEMPLATE = "{question}"

    def __init__(self, identifier: str, *, prompt_template: str = TEMPLATE, attempts: int = 1, **kwargs: Any) -> None:
        super().__init__(identifier, prompt_template)
        self.library = _library("reasoning_gym", f"reasoning_gym:{identifier}", "reasoning-gym")
        self.attempts, self.settings = attempts, kwargs
        self._new_task(0)

    def reset(self, seed: int | None = None) -> str:
        """A new task."""
        self._new_task(int(np.random.default_rng().integers(2**31)) if seed is None else seed)
        self.attempts_left = self.attempts
        return self._prompt(question=self.entry["question"])

    def step(self, action: str) -> Step:
        """Scores the answer."""
        self.attempts_left -= 1
        score = float(self.task.score_answer(extract_answer(action, str(self.entry["answer"])), self.entry))
        self._done = score >= 1 or self.attempts_left <= 0
        if self._done:
            return "Correct." if score >= 1 else "That is not right.", score, True, {"score": score}
        return f"That is not right. Attempts left: {self.attempts_left}.", 0.0, False, {"score": score}

    def _new_task(self, seed: int) -> None:
        try:
            self.task = self.library.create_dataset(self.name, size=1, seed=seed, **self.settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym:{self.name} cannot be made with {self.settings}: {error}") from error
        self.entry = self.task[0]


class TextArenaEnvironment(_Adapter):
    """`textarena:ID`: a single-player game that needs no network and no model of its own.

    Args:
        identifier: such as "GuessTheNumber-v0".
        prompt_template: fields {name}, {observation}, the game's own instructions.
        invalid_reward: reward of a game that ends by a second invalid move in a row; None: the game's own, which in
            some (GuessTheNumber) is as good as the last valid one's.
        kwargs: go to the game, such as max_turns.
    Each observation holds what the game has said since the last; the reward comes at the end of the game. The game
    draws from Python's global generator: it gets one of its own for each call.
    """

    TEMPLATE = "{observation}"

    def __init__(
        self,
        identifier: str,
        *,
        prompt_template: str = TEMPLATE,
        invalid_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, prompt_template)
        self.invalid_reward = invalid_reward
        self.library = _library("textarena", f"textarena:{identifier}", "textarena")
        self.generators = OwnGenerators(0)
        with self.generators.installed():
            self.game, self.action_wrappers = self._make(kwargs)

    def reset(self, seed: int | None = None) -> str:
        """A new game, and its instructions."""
        seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        self._done, self.generators = False, OwnGenerators(seed)
        with self.generators.installed():
            self.game.reset(num_players=1, seed=seed)
            return self._prompt(observation=self._said())

    def step(self, action: str) -> Step:
        """One move; the game itself says what was wrong with it."""
        if self._done:
            return "The game is over.", 0.0, True, {}
        for wrapper in self.action_wrappers:
            action = wrapper.action(action)
        with self.generators.installed():
            try:
                done, _ = self.game.step(action)
            except Exception as error:  # games trip over texts that they do not expect
                self._said()
                return "The game cannot read that move.", 0.0, False, {"valid": False, "error": repr(error)[:200]}
            observation = self._said()
        self._done = bool(done)
        return self._ending(observation) if self._done else (observation, 0.0, False, {"valid": True})

    def _ending(self, observation: str) -> Step:
        rewards, infos = self.game.close()
        reason, reward = str(infos[0].get("reason") or ""), (rewards or {}).get(0, 0.0)
        valid = not infos[0].get("invalid_move", False)
        if not valid and self.invalid_reward is not None:
            reward = self.invalid_reward
        # some games have the reason in the reward's place
        number = float(reward) if isinstance(reward, int | float) else 0.0
        return f"{observation}\n{reason}".strip(), number, True, {"valid": valid, "reason": reason}

    def _said(self) -> str:
        _, messages = self.game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages if sender != 0).strip()

    def _make(self, kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """The game without its observation wrappers, which repeat the whole history, and its action wrappers."""
        try:
            game = self.library.make(self.name, **kwargs)
            wrappers = []
            while isinstance(game, self.library.Wrapper):
                wrappers += [game] if isinstance(game, self.library.ActionWrapper) else []
                game = game.env
            game.reset(num_players=1, seed=0)
        except Exception as error:  # each game fails in its own way over what it lacks
            raise ValueError(f"textarena:{self.name} cannot be played here: {_why(error)}") from error
        if not isinstance(game.state, self.library.SinglePlayerState):
            raise ValueError(f"textarena:{self.name} is no single-player game")
        return game, wrappers


def _why(error: Exception) -> str:
    """A word on the usual reasons."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, LookupError) and "Resource" in text:
        return (
            "it needs NLTK data that is not there; download it once (python -m nltk.downloader words) or choose another"
        )
    if isinstance(error, AssertionError) and "number of players" in text:
        return "it is no single-player game"
    return f"{type(error).__name__}: {text}"


def _library(module: str, wanted_by: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"environment {wanted_by} needs the package: pip install {package}") from error


ADAPTERS: dict[str, Callable[..., BaseEnvironment]] = {
    "gymnasium": GymnasiumEnvironment,
    "reasoning_gym": ReasoningGymEnvironment,
    "textarena": TextArenaEnvironment,
}
