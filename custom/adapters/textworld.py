"""TextWorld's text adventures as environments: a game file, or games that its own generators make from the seed.

Invariant: rewards add up to score / max_score, so that a game that is won pays 1; what the game does not understand it
answers itself.
"""

import random
import re
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from custom.adapters.base import Adapter, Step
from data.texts import table

# Generators and the settings they take.
CHALLENGES: dict[str, dict[str, Any]] = table(__file__)
LONGEST_COMMAND = 190
# They stop, rewind or write the game, and are no part of it.
META_VERBS = "quit|q|restart|restore|save|undo|script|transcript|unscript|noscript|recording|replay"
META = re.compile(rf"(?i)\btw-\w|\b(?:{META_VERBS})\s*(?:$|[.;,]|then\b)")
INFOS = ("feedback", "objective", "admissible_commands", "score", "max_score", "won", "lost")
# The generators share tables and a parser.
_GENERATING = threading.Lock()


class TextWorldEnvironment(Adapter):
    """Plays `textworld:NAME`: a text adventure.

    Args:
        identifier: a game file (.z8 and other Z-machine games), or a generator: tw-simple, tw-cooking,
            tw-coin_collector or tw-treasure_hunter, whose game the seed chooses.
        prompt_template: fields {name}, {objective}, {observation} (which begins with the objective).
        max_episode_steps: commands until the episode ends; None: until the game does.
        kwargs: a generator's settings, see textworld.yaml.
    """

    def __init__(
        self, identifier: str, *, max_episode_steps: int | None = 50, **kwargs: Any
    ) -> None:
        super().__init__(identifier, kwargs)
        # The interpreter says so of each game that is not a famous one.
        warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")
        self.max_turns = max_episode_steps
        if identifier not in CHALLENGES and not Path(identifier).is_file():
            raise ValueError(f"it is neither a file nor a generator: {', '.join(CHALLENGES)}")
        allowed = CHALLENGES.get(identifier, {})
        if unknown := sorted(self.settings.keys() - allowed.keys()):
            raise ValueError(f"it takes no {unknown}; allowed: {', '.join(allowed) or 'nothing'}")
        self.settings = {**allowed, **self.settings}
        self.start(0)

    def start(self, seed: int) -> str:
        """Starts the seed's game and returns its objective and first room."""
        import textworld

        self.close()
        self.steps, self.score = 0, 0
        path = self._generate(seed % 2**32) if self.name in CHALLENGES else self.name
        self.game = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(INFOS, True)))
        self.game.seed(seed)
        self.state = self.game.reset()
        objective, text = str(self.state.objective or ""), str(self.state.feedback or "")
        # Before its objective a game shows the library's name in large letters.
        begin = max(text.find(objective[:40]), 0)
        return self.fill_prompt(objective=objective, observation=_told(text[begin:]))

    def play(self, action: str) -> Step:
        """Types a command, the answer's last line, and returns what the game says."""
        self.steps += 1
        command, before = _as_command(action), self.score
        text, reward, over = "That command is not available.", 0.0, False
        if not META.search(command):
            self.state, score, over = self.game.step(command)
            self.score, most = int(score or 0), int(self.state.max_score or 0)
            reward = (self.score - before) / most if most > 0 else float(bool(self.state.won))
            text = str(self.state.feedback or "").strip()
        done = bool(over or self.state.won or self.state.lost) or self.steps == self.max_turns
        return _told(text), reward, done, {"score": self.score, "won": bool(self.state.won)}

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns one of the commands that do something now; None where the game does not list them."""
        commands = self.state.admissible_commands
        return generator.choice(commands) if commands else None

    def _generate(self, seed: int) -> str:
        """Generates the seed's game and compiles it to a file, whose folder is deleted with this object."""
        import textworld
        from textworld import challenges

        self.folder = tempfile.TemporaryDirectory(prefix="textworld")
        options = textworld.GameOptions()
        options.seeds, options.path = seed, f"{self.folder.name}/game.z8"
        settings = self.settings
        if settings.get("recipe_seed", seed) is None:
            settings = {**settings, "recipe_seed": seed}
        with _GENERATING:
            textworld.g_rng.set_seed(seed)
            game = challenges.CHALLENGES[self.name][1](settings, options)
            return str(textworld.generator.compile_game(game, options))


def _told(text: str) -> str:
    """Returns what the game said, without the last line's prompt and rows of empty lines."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\n>[^\n]*$", "", text.rstrip())).strip()


def _as_command(text: str) -> str:
    """Returns the last line that is not empty, without a leading ">", cut, in the characters of words.

    A backslash would speak to the interpreter, which answers an unknown one without end; stars write the game's end.
    """
    lines = [line.strip().lstrip(">").strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"[^\w ,.;!?'\"-]", "?", lines[-1] if lines else "", flags=re.ASCII)[
        :LONGEST_COMMAND
    ]
