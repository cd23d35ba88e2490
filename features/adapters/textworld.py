"""TextWorld's text adventures as environments: a game file, or games that its generators make.

Invariant: rewards add up to score / max_score, so that a game that is won pays 1; what the game
does not understand it answers itself.
"""

import random
import re
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from features.adapters.base import Adapter, Step

# TextWorld's generators, and the settings they take with their defaults.
GENERATORS: dict[str, dict[str, Any]] = {
    "tw-simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "tw-coin_collector": {"level": 1},
    "tw-treasure_hunter": {"level": 1},
    # Its recipe_seed is the episode's seed unless it is given.
    "tw-cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "split": None,
        "recipe_seed": None,
        "open": False,
        "cook": False,
        "cut": False,
        "drop": False,
    },
}
# Characters of a command.
LONGEST_COMMAND = 190
# They stop, rewind or write the game, and are no part of it.
META_VERBS = "quit|q|restart|restore|save|undo|script|transcript|unscript|noscript|recording|replay"
META = re.compile(rf"(?i)\btw-\w|\b(?:{META_VERBS})\s*(?:$|[.;,]|then\b)")
# A game is asked to report these after each command.
INFOS = ("feedback", "objective", "admissible_commands", "score", "max_score", "won", "lost")
# The generators share tables and a parser.
_GENERATING = threading.Lock()


class TextWorldEnvironment(Adapter):
    """Plays `textworld:NAME`: a text adventure.

    Args:
        identifier: a game file (.z8 and other Z-machine games), or a generator: tw-simple,
            tw-cooking, tw-coin_collector or tw-treasure_hunter, whose game the seed chooses.
        prompt_template: fields {name}, {objective}, {observation} (which begins with the
            objective).
        max_episode_steps: commands until the episode ends; None: until the game does.
        kwargs: a generator's settings, see GENERATORS.
    """

    def __init__(
        self, identifier: str, *, max_episode_steps: int | None = 50, **kwargs: Any
    ) -> None:
        super().__init__(identifier, kwargs)
        # The interpreter says so of each game that is not a famous one.
        warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")
        self.max_turns = max_episode_steps
        if identifier not in GENERATORS and not Path(identifier).is_file():
            raise ValueError(f"it is neither a file nor a generator: {', '.join(GENERATORS)}")
        defaults = GENERATORS.get(identifier, {})
        unknown = sorted(self.settings.keys() - defaults.keys())
        if unknown:
            raise ValueError(f"it takes no {unknown}; allowed: {', '.join(defaults) or 'nothing'}")
        self.settings = {**defaults, **self.settings}
        self.start(0)

    def start(self, seed: int) -> str:
        """Starts the seed's game and returns its objective and first room."""
        import textworld

        self.close()
        self.steps = 0
        self.score = 0
        path = self.name
        if self.name in GENERATORS:
            path = self._generate(seed % 2**32)
        self.game = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(INFOS, True)))
        self.game.seed(seed)
        self.state = self.game.reset()
        objective = str(self.state.objective or "")
        text = str(self.state.feedback or "")
        # Before its objective a game shows the library's name in large letters.
        begin = max(text.find(objective[:40]), 0)
        return self.fill_prompt(objective=objective, observation=_tidy(text[begin:]))

    def play(self, action: str) -> Step:
        """Types a command, the answer's last line, and returns what the game says."""
        self.steps += 1
        command = _as_command(action)
        text = "That command is not available."
        reward = 0.0
        over = False
        if not META.search(command):
            self.state, score, over = self.game.step(command)
            reward = self._reward(int(score or 0))
            text = str(self.state.feedback or "").strip()
        won = bool(self.state.won)
        done = bool(over or won or self.state.lost) or self.steps == self.max_turns
        return _tidy(text), reward, done, {"score": self.score, "won": won}

    def _reward(self, score: int) -> float:
        """Returns the new score's gain as a part of the most; without a score 1 for winning."""
        gain = score - self.score
        self.score = score
        max_score = int(self.state.max_score or 0)
        if max_score > 0:
            return gain / max_score
        return 1.0 if self.state.won else 0.0

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns one of the commands that do something now.

        None where the game does not list them.
        """
        commands = self.state.admissible_commands
        return generator.choice(commands) if commands else None

    def _generate(self, seed: int) -> str:
        """Generates the seed's game and compiles it to a file.

        The file's folder is deleted with this object.
        """
        import textworld
        from textworld import challenges

        self.folder = tempfile.TemporaryDirectory(prefix="textworld")
        options = textworld.GameOptions()
        options.seeds = seed
        options.path = f"{self.folder.name}/game.z8"
        settings = self.settings
        if settings.get("recipe_seed", seed) is None:
            settings = {**settings, "recipe_seed": seed}
        with _GENERATING:
            textworld.g_rng.set_seed(seed)
            make_game = challenges.CHALLENGES[self.name][1]
            game = make_game(settings, options)
            return str(textworld.generator.compile_game(game, options))


def _tidy(text: str) -> str:
    """Returns what the game said, without the last line's prompt and rows of empty lines."""
    without_prompt = re.sub(r"\n>[^\n]*$", "", text.rstrip())
    return re.sub(r"\n{3,}", "\n\n", without_prompt).strip()


def _as_command(text: str) -> str:
    """Returns the last line that is not empty, without a leading ">", as a command.

    It is cut, and has the characters of words only: a backslash would speak to the interpreter,
    which answers an unknown one without end; stars write the game's end.
    """
    lines = [line.strip().lstrip(">").strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return re.sub(r"[^\w ,.;!?'\"-]", "?", last, flags=re.ASCII)[:LONGEST_COMMAND]
