"""textarena's games for one player, or for two against an opponent, as environments.

The other seat is played by moves drawn at random, a user's function or class, or an earlier policy: each is called with
what the game has said to it since its last move, and returns its move. Invariant: a game draws from generators of its
own, so that its seed and the moves decide the episode; and in a game of two no move pays more than losing that the game
cannot read.
"""

import copy
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from custom.adapters.base import Adapter, Step
from custom.env import MAX_OBSERVATION_CHARS, BadEnvironment, Message, OwnGenerators, cut_middle, shown, takes_keyword
from data.loading import load_object

Opponent = Callable[[str], str]

BRACKETED = re.compile(r"\[([^\[\]\n]{1,60})\]")
OPPONENTS = "random, FILE.py:NAME, PACKAGE.MODULE:NAME or hf:FOLDER"


def opponent_maker(source: str, options: Mapping[str, Any]) -> Callable[[int], Opponent] | None:
    """Returns what makes an episode's opponent from its seed; None for "random", whose moves the game's rules choose.

    Args:
        source: "random"; "FILE.py:NAME" or "PACKAGE.MODULE:NAME", a function of the observation, or a class that is
            built for each episode and called with it; "hf:FOLDER", see PolicyOpponent.
        options: keyword arguments of the function, the class or PolicyOpponent; `seed` is added where it is taken.
    Raises: ValueError, FileNotFoundError for what does not exist.
    """
    if source == "random":
        if options:
            raise ValueError(f"opponent=random takes no opponent_options, given: {', '.join(options)}")
        return None
    if source.startswith("hf:"):
        folder = str(Path(source.removeprefix("hf:")).expanduser().resolve())
        if not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(f"opponent={source!r}: {folder} holds no config.json; give a Hugging Face folder")
        make, options = PolicyOpponent, {"folder": folder, **options}
    elif ":" not in source:
        raise ValueError(f"opponent={source!r} is unknown; allowed: {OPPONENTS}")
    else:
        make = load_object(source, "opponent")
    seeded = takes_keyword(make, "seed")

    def opponent(seed: int) -> Opponent:
        further = {"seed": seed, **options} if seeded else options
        return make(**further) if isinstance(make, type) else partial(make, **further)

    return opponent


@dataclass
class PolicyOpponent:
    """Plays a policy from a Hugging Face folder, such as global_step_N/actor/huggingface of an earlier run.

    It keeps a conversation as the player does: observations from the user, its own moves from the assistant.

    Args:
        folder: with the model, the tokenizer and its chat template; loaded once per process.
        max_new_tokens: the longest move, in tokens.
        temperature: 0 is greedy.
        device: "cpu", "cuda" …
        seed: of what it samples.
    """

    folder: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    device: str = "cpu"
    seed: int = 0
    messages: list[Message] = field(default_factory=list, init=False)

    def __call__(self, observation: str) -> str:
        """Adds the observation to the conversation and returns the policy's answer."""
        import torch

        said = [*self.messages, {"role": "user", "content": observation}]
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        with torch.random.fork_rng(devices=[self.device] if self.device.startswith("cuda") else []):
            play = load_policy(self.folder, self.device)
            torch.manual_seed(self.seed + len(said))
            self.messages = play(said, max_new_tokens=self.max_new_tokens, **sampling)[0]["generated_text"]
        return self.messages[-1]["content"]


@cache
def load_policy(folder: str, device: str) -> Any:
    """Loads the policy and its tokenizer once per process."""
    from transformers import pipeline

    return pipeline("text-generation", folder, device=device)


def draw_moves(said: str, latest: str, generator: random.Random) -> Iterator[str]:
    """Yields moves without end, in the form that a game's words show: "[4]", "[pile quantity]" -> "[4]", "[0 3]".

    Some are taken from the latest words as they are, which often list what is allowed; most from any words, with other
    numbers, coordinates and letters; and a few are single words of the game.
    """
    listed = BRACKETED.findall(latest) or BRACKETED.findall(said) or ["0"]
    shapes = list(dict.fromkeys(BRACKETED.findall(said))) or listed
    numbers = sorted({int(digits[:6]) for digits in re.findall(r"\d+", said)} | {3, 5, 9})
    letters = sorted(set(re.findall(r"\b[A-Za-z]\b", said)) | {"a", "b"})
    words = sorted(set(re.findall(r"[^\W\d_]+", said))) or ["pass"]
    while True:
        kind = generator.random()
        move = generator.choice(listed if kind < 0.25 else shapes if kind < 0.85 else words)
        yield f"[{_vary(move, generator.choice(numbers[:12]), letters, generator) if 0.25 <= kind < 0.85 else move}]"


def _vary(shape: str, most: int, letters: list[str], generator: random.Random) -> str:
    """Draws another move of this shape: squares near each other, other numbers up to `most`, other letters, …

    … and, in some, numbers for all words, or for half of them: "row" and "<x>" may stand for numbers.
    """

    def number(match: re.Match[str]) -> str:
        return str(generator.randint(0, most))

    column, row = generator.randrange(8), generator.randint(0, 8)

    def square(match: re.Match[str]) -> str:
        nonlocal column, row
        drawn = f"{'abcdefghijklmno'[abs(column)]}{abs(row)}"
        column, row = column + generator.randint(-2, 2), row + generator.randint(-2, 2)
        return drawn.upper() if match[1].isupper() else drawn

    shape = re.sub(r"(?<![A-Za-z])([A-Za-z])\d{1,2}", square, shape)
    shape = re.sub(r"(?<![A-Za-z\d])\d+|<\w+>", number, shape)
    share = generator.choice((0.0, 0.5, 1.0))
    shape = re.sub(r"[A-Za-z]{2,}", lambda match: number(match) if generator.random() < share else match[0], shape)
    single = generator.choice((number, lambda match: generator.choice(letters), lambda match: match[0]))
    return re.sub(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z\d])", single, shape)


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
        opponent: who plays the other seat of a game of two: "random" (allowed moves), "FILE.py:NAME" or
            "PACKAGE.MODULE:NAME" (a function of the observation, or a class built for each episode), "hf:FOLDER".
        opponent_options: keyword arguments of that function or class; for hf those of `PolicyOpponent`.
        seat: the player's, 0 (moves first) or 1.
        kwargs: go to the game, such as max_turns.
    Each observation holds what the game has said since the last; the reward comes at the end of the game, in a game of
    two usually 1, 0 or -1. `info["opponent_invalid"]` says that the opponent's move was invalid: it tries again, or
    loses, as the game has it; one at which the game raises ends it, paying nothing. `max_turns` of a game of two counts
    both seats' moves. In a thread, other threads that draw from the global generators meanwhile change the game.
    """

    def __init__(
        self,
        identifier: str,
        *,
        invalid_reward: float | None = 0.0,
        opponent: str | None = None,
        opponent_options: Mapping[str, Any] | None = None,
        seat: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, kwargs)
        self.seat, self.source = seat, opponent
        import textarena

        # Some games draw as they are made: not from what another thread's game is drawing from.
        with OwnGenerators(0).installed():
            # The wrapped game reads actions; its observations would repeat the whole history.
            self.wrapped = self.game = textarena.make(identifier, **self.settings)
            while isinstance(self.game, textarena.Wrapper):
                self.game = self.game.env
            self.players = _count_players(self.game, textarena.SinglePlayerState)
        if self.players == 1 and (opponent or seat):
            raise ValueError("it is a game for one player: leave out opponent and seat")
        if self.players == 2 and (opponent is None or seat not in (0, 1)):
            given, allowed = f"opponent={opponent!r}, seat={seat!r}", f"opponent: {OPPONENTS}; seat: 0 or 1"
            raise ValueError(f"it is a game of two, given {given}; allowed: {allowed}")
        self.make_opponent = opponent_maker(opponent, opponent_options or {}) if opponent else None
        # In a game of two no such move pays more than losing.
        self.invalid_reward = min(-1.0, invalid_reward or 0.0) if self.players == 2 else invalid_reward
        turns = getattr(self.game.state, "max_turns", None)
        # Some games notice their limit a move later.
        self.max_turns = turns + 1 if isinstance(turns, int) else None

    def start(self, seed: int) -> str:
        """Starts a new game and returns its instructions, after the opponent's first move where it has that."""
        self.over, self.unreadable, self.words, self.generators = False, 0, ["", ""], OwnGenerators(seed)
        with self.generators.installed():
            self.game.reset(num_players=self.players, seed=seed)
        generator = random.Random(seed)
        self.opponent: Opponent = lambda heard: self._draw_move(1 - self.seat, generator) or "[pass]"
        if self.make_opponent:
            self.opponent = self.make_opponent(seed)
        self._answer()
        return self.fill_prompt(observation=self._said(self.seat))

    def play(self, action: str) -> Step:
        """Plays one move, and the opponent's answer; the game itself says what was wrong with a move."""
        if not self.over and (error := self._move(action)):
            self.unreadable += 1
            reward = (self.invalid_reward or 0.0) if self.unreadable > 1 else 0.0
            return UNREADABLE, reward, self.unreadable > 1, {"valid": False, "error": error}
        self.unreadable = 0
        info: dict[str, Any] = {"valid": self.over or not _is_invalid(self.game, self.seat)}
        if self._answer():
            info["opponent_invalid"] = True
        if not self.over:
            return self._said(self.seat), 0.0, False, info
        rewards, infos = self.game.close()
        mine, reward = infos.get(self.seat, {}), (rewards or {}).get(self.seat, 0.0)
        # Some games have the reason in the reward's place.
        number = float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else 0.0
        if mine.get("invalid_move", False):
            number = number if self.invalid_reward is None else self.invalid_reward
            info["valid"] = False
        info["reason"] = str(mine.get("reason") or "")
        return f"{self._said(self.seat)}\n{info['reason']}".strip(), number, True, info

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns a move that the game allows now, tried on a copy of it; None: none was found."""
        return None if self._done or self.over else self._draw_move(self.seat, generator)

    def _answer(self) -> bool:
        """Plays the opponent's moves until it is the player's turn or the game ends; says if one was invalid."""
        other, invalid = 1 - self.seat, False
        for _ in range(MOST_OPPONENT_MOVES):
            if self.players == 1 or self.over or self.game.state.current_player_id == self.seat:
                return invalid
            move = self.opponent(cut_middle(self._said(other), MAX_OBSERVATION_CHARS) or UNREADABLE)
            if not isinstance(move, str):
                raise BadEnvironment(f"opponent={self.source!r} returned {shown(move)}; allowed: a string")
            if self._move(move):
                break
            invalid = invalid or _is_invalid(self.game, other)
        self.over = True
        self.game.state.game_info[self.seat]["reason"] = "The opponent makes no move that the game can read."
        return True

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
        latest = "\n".join(str(text) for _, text, _ in state.observations[player]) or self.words[player][-2000:]
        # Word lists and other large tables are not changed by a move.
        tables = [value for value in vars(self.game).values() if isinstance(value, list | dict | set | tuple)]
        shared: dict[int, Any] = {id(value): value for value in tables if len(value) > 1000} | {id(state.logs): []}
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
            f"[{roles.get(sender, sender)}] {text}" if isinstance(sender, int) and sender >= 0 else str(text)
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
