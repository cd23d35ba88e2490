"""textarena's games for a single player, as environments.

Invariant: a game draws from generators of its own, so that its seed and the moves decide the episode.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from custom.adapters.base import Adapter, Step, import_library
from custom.env import OwnGenerators


class TextArenaEnvironment(Adapter):
    """Plays `textarena:ID`: a single-player game that needs no network and no model of its own.

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
        self.library = import_library("textarena", identifier)
        self.generators = OwnGenerators(0)
        with self.generators.installed():
            self.game, self.action_wrappers = self._make(kwargs)

    def reset(self, seed: int | None = None) -> str:
        """Starts a new game and returns its instructions."""
        seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        self._done, self.generators = False, OwnGenerators(seed)
        with self.generators.installed():
            self.game.reset(num_players=1, seed=seed)
            return self.fill_prompt(observation=self._said())

    def step(self, action: str) -> Step:
        """Plays one move; the game itself says what was wrong with it."""
        if self._done:
            return "The game is over.", 0.0, True, {}
        for wrapper in self.action_wrappers:
            action = wrapper.action(action)
        with self.generators.installed():
            try:
                done, _ = self.game.step(action)
            # Games trip over texts that they do not expect.
            except Exception as error:
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
        # Some games have the reason in the reward's place.
        number = float(reward) if isinstance(reward, int | float) else 0.0
        return f"{observation}\n{reason}".strip(), number, True, {"valid": valid, "reason": reason}

    def _said(self) -> str:
        _, messages = self.game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages if sender != 0).strip()

    def _make(self, kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Makes the game without its observation wrappers, which repeat the whole history, and its action wrappers."""
        try:
            game = self.library.make(self.name, **kwargs)
            wrappers = []
            while isinstance(game, self.library.Wrapper):
                wrappers += [game] if isinstance(game, self.library.ActionWrapper) else []
                game = game.env
            game.reset(num_players=1, seed=0)
        # Each game fails in its own way over what it lacks.
        except Exception as error:
            raise ValueError(f"textarena:{self.name} cannot be played here: {_why(error)}") from error
        if not isinstance(game.state, self.library.SinglePlayerState):
            raise ValueError(f"textarena:{self.name} is no single-player game")
        return game, wrappers


def _why(error: Exception) -> str:
    """Explains the usual reasons."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, LookupError) and "Resource" in text:
        download = "python -m nltk.downloader words"
        return f"it needs NLTK data that is not there; download it once ({download}) or choose another"
    if isinstance(error, AssertionError) and "number of players" in text:
        return "it is no single-player game"
    return f"{type(error).__name__}: {text}"
