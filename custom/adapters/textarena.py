"""textarena's games for one player, or for two against an opponent, as environments.

The second player draws moves at random, or is a user's function or class, or an earlier policy: each is called with
what the game has said to it since its last move, and returns its move. Invariant: a game draws from generators of its
own, so that its seed and the moves decide the episode; and in a game of two no move pays more than losing that the game
cannot read.
"""

import copy
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from custom.adapters.base import Adapter, Step
from custom.env import (
    MAX_OBSERVATION_CHARS,
    BadEnvironment,
    Message,
    OwnGenerators,
    cut_middle,
    shown,
)
from data.loading import load_object

Opponent = Callable[[str], str]

BRACKETED = re.compile(r"\[([^\[\]\n]{1,60})\]")
OPPONENTS = "random, FILE.py:NAME, PACKAGE.MODULE:NAME or hf:FOLDER"


def opponent_maker(source: str) -> Callable[[int], Opponent] | None:
    """Returns what makes an episode's opponent from its seed; None for "random", whose moves the game's rules choose.

    Args:
        source: "random"; "FILE.py:NAME" or "PACKAGE.MODULE:NAME", a function of the observation, or a class that is
            built from each episode's seed and called with it; "hf:FOLDER", see PolicyOpponent.
    Raises: ValueError, FileNotFoundError for what does not exist.
    """
    if source == "random":
        return None
    if source.startswith("hf:"):
        folder = str(Path(source.removeprefix("hf:")).expanduser().resolve())
        if not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(
                f"opponent={source!r}: {folder} holds no config.json; give a Hugging Face folder"
            )
        return lambda seed: PolicyOpponent(folder)
    if ":" not in source:
        raise ValueError(f"opponent={source!r} is unknown; allowed: {OPPONENTS}")
    make = load_object(source, "opponent")
    return make if isinstance(make, type) else lambda seed: make


@dataclass
class PolicyOpponent:
    """Plays a policy from a Hugging Face folder, such as global_step_N/actor/huggingface of an earlier run.

    It keeps a conversation as the player does: observations from the user, its own moves from the assistant.

    Its moves are greedy. `folder` has the model, the tokenizer and its chat template, and is loaded once per process.
    """

    folder: str
    messages: list[Message] = field(default_factory=list, init=False)

    def __call__(self, observation: str) -> str:
        """Adds the observation to the conversation and returns the policy's answer."""
        said = [*self.messages, {"role": "user", "content": observation}]
        self.messages = load_policy(self.folder)(said, max_new_tokens=128, do_sample=False)[0][
            "generated_text"
        ]
        return self.messages[-1]["content"]


@cache
def load_policy(folder: str) -> Any:
    """Loads the policy and its tokenizer once per process."""
    from transformers import pipeline

    return pipeline("text-generation", folder, device="cpu")


def draw_moves(said: str, latest: str, generator: random.Random) -> Iterator[str]:
    """Yields moves without end, in the form that a game's words show: "[4]", "[pile quantity]" -> "[4]", "[0 3]".

    Some are taken from the latest words as they are, which often list what is allowed; most from any words, with other
    numbers, and in half of those with numbers for words: "row" and "<x>" may stand for them.
    """
    listed = BRACKETED.findall(latest) or BRACKETED.findall(said) or ["0"]
    shapes = BRACKETED.findall(said) or listed
    numbers = sorted({int(digits[:6]) for digits in re.findall(r"\d+", said)} | {3, 5, 9})[:12]
    while True:
        shape, kind = generator.choice(shapes), generator.random()
        places = r"\d+|<\w+>" if kind < 0.6 else r"\d+|<\w+>|[A-Za-z]{2,}"
        varied = re.sub(
            places, lambda _: str(generator.randint(0, generator.choice(numbers))), shape
        )
        yield f"[{generator.choice(listed) if kind < 0.25 else varied}]"


# The policy's number, who is the first, and the opponent's.
PLAYER, OTHER = 0, 1
# Moves that are tried on a copy of the game until one is allowed.
TRIES = 500
# A game in which the opponent moves so often in a row will not come back.
MOST_OPPONENT_MOVES = 200
UNREADABLE = "The game cannot read that move."


class TextArenaEnvironment(Adapter):
    """Plays `textarena:ID`: a game for one or two players that needs no network and no model of its own.

    Args:
        identifier: such as "GuessTheNumber-v0", or "TicTacToe-v0" with an opponent.
        prompt_template: fields {name}, {observation}, the game's own instructions.
        invalid_reward: reward of a game that ends by a second invalid move in a row; None: the game's own, which pays
            for quitting in some (Mastermind 0.75 for one guess). In a game of two it is a loss, -1, or less.
        opponent: who plays second in a game of two: "random" (allowed moves), "FILE.py:NAME" or
            "PACKAGE.MODULE:NAME" (a function of the observation, or a class built for each episode), "hf:FOLDER".
        kwargs: go to the game, such as max_turns.
    Each observation holds what the game has said since the last; the reward comes at the end of the game, in a game of
    two usually 1, 0 or -1. Where the opponent's move was invalid it tries again, or loses, as the game has it; one at
    which the game raises ends it, paying nothing. `max_turns` of a game of two counts both players' moves. In a thread,
    other threads that draw from the global generators meanwhile change the game.
    """

    def __init__(
        self,
        identifier: str,
        *,
        invalid_reward: float | None = 0.0,
        opponent: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, kwargs)
        self.source = opponent
        import textarena

        # Some games draw as they are made: not from what another thread's game is drawing from.
        with OwnGenerators(0).installed():
            # The wrapped game reads actions; its observations would repeat the whole history.
            self.wrapped = self.game = textarena.make(identifier, **self.settings)
            while isinstance(self.game, textarena.Wrapper):
                self.game = self.game.env
            self.players = _count_players(self.game, textarena.SinglePlayerState)
        if (self.players == 2) != (opponent is not None):
            raise ValueError(
                f"it is a game of {self.players}, given {opponent=}; for two players allowed: {OPPONENTS}"
            )
        self.make_opponent = opponent_maker(opponent) if opponent else None
        # In a game of two no such move pays more than losing.
        self.invalid_reward = (
            min(-1.0, invalid_reward or 0.0) if self.players == 2 else invalid_reward
        )
        turns = getattr(self.game.state, "max_turns", None)
        # Some games notice their limit a move later.
        self.max_turns = turns + 1 if isinstance(turns, int) else None

    def start(self, seed: int) -> str:
        """Starts a new game and returns its instructions."""
        self.over, self.unreadable, self.words, self.generators = (
            False,
            0,
            ["", ""],
            OwnGenerators(seed),
        )
        with self.generators.installed():
            self.game.reset(num_players=self.players, seed=seed)
        generator = random.Random(seed)
        self.opponent: Opponent = lambda heard: self._draw_move(OTHER, generator) or "[pass]"
        if self.make_opponent:
            self.opponent = self.make_opponent(seed)
        self._answer()
        return self.fill_prompt(observation=self._said(PLAYER))

    def play(self, action: str) -> Step:
        """Plays one move, and the opponent's answer; the game itself says what was wrong with a move."""
        if not self.over and (error := self._move(action)):
            self.unreadable += 1
            reward = (self.invalid_reward or 0.0) if self.unreadable > 1 else 0.0
            return UNREADABLE, reward, self.unreadable > 1, {"valid": False, "error": error}
        self.unreadable = 0
        info: dict[str, Any] = {"valid": self.over or not _is_invalid(self.game, PLAYER)}
        self._answer()
        if not self.over:
            return self._said(PLAYER), 0.0, False, info
        rewards, infos = self.game.close()
        mine, reward = infos.get(PLAYER, {}), (rewards or {}).get(PLAYER, 0.0)
        # Some games have the reason in the reward's place.
        number = float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else 0.0
        if mine.get("invalid_move", False):
            number = number if self.invalid_reward is None else self.invalid_reward
            info["valid"] = False
        return f"{self._said(PLAYER)}\n{mine.get('reason') or ''}".strip(), number, True, info

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns a move that the game allows now, tried on a copy of it; None: none was found."""
        return None if self._done or self.over else self._draw_move(PLAYER, generator)

    def _answer(self) -> None:
        """Plays the opponent's moves until it is the player's turn or the game ends."""
        for _ in range(MOST_OPPONENT_MOVES):
            if self.players == 1 or self.over or self.game.state.current_player_id == PLAYER:
                return
            move = self.opponent(cut_middle(self._said(OTHER), MAX_OBSERVATION_CHARS) or UNREADABLE)
            if not isinstance(move, str):
                raise BadEnvironment(
                    f"opponent={self.source!r} returned {shown(move)}; allowed: a string"
                )
            if self._move(move):
                break
        self.over = True
        self.game.state.game_info[PLAYER]["reason"] = (
            "The opponent makes no move that the game can read."
        )

    def _move(self, action: str, trial: Any = None) -> str:
        """Plays a move of whose turn it is, on the game or on a copy of it; returns what that raised, or nothing."""
        # A copy does not move the game's own generators on.
        with (OwnGenerators(0) if trial else self.generators).installed():
            try:
                over = bool((trial or self.wrapped).step(action)[0])
            # Games trip over texts that they do not expect.
            except Exception as error:
                return repr(error)[:200]
        self.over = self.over if trial else over
        return ""

    def _draw_move(self, player: int, generator: random.Random) -> str | None:
        """Draws moves until one is allowed on a copy of the game; None: none was found."""
        state = self.game.state
        latest = (
            "\n".join(str(text) for _, text, _ in state.observations[player])
            or self.words[player][-2000:]
        )
        # Word lists and other large tables are not changed by a move.
        tables = [
            value
            for value in vars(self.game).values()
            if isinstance(value, list | dict | set | tuple)
        ]
        shared: dict[int, Any] = {id(value): value for value in tables if len(value) > 1000} | {
            id(state.logs): []
        }
        for move in islice(draw_moves(self.words[player] + latest, latest, generator), TRIES):
            trial = copy.deepcopy(self.wrapped, dict(shared))
            if not self._move(move, trial) and not _is_invalid(trial, player):
                return move
        return None

    def _said(self, player: int) -> str:
        """Returns what the game, and the other player, have said to the player since the last call."""
        state = self.game.state
        if state.current_player_id == player:
            _, messages = self.game.get_observation()
        else:
            messages, state.observations[player] = state.observations[player], []
        roles = state.role_mapping
        text = "\n".join(
            f"[{roles.get(sender, sender)}] {text}"
            if isinstance(sender, int) and sender >= 0
            else str(text)
            for sender, text, _ in messages
            if sender != player
        ).strip()
        self.words[player] += f"{text}\n"
        return text


def _is_invalid(game: Any, player: int) -> bool:
    """Says whether the last move, the player's, was invalid."""
    state = game.state
    lost_by_it = state.game_info.get(player, {}).get("invalid_move", False)
    return bool(lost_by_it or (state.error_count and not state.done))


def _count_players(game: Any, alone: type) -> int:
    """Resets the game for one player, else for two; raises what the game says to that."""
    with suppress(AssertionError, ValueError):
        game.reset(num_players=1, seed=0)
        if isinstance(game.state, alone):
            return 1
    game.reset(num_players=2, seed=0)
    return 2
