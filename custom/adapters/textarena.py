"""textarena's games for one player, or for two against an opponent, as environments.

Invariant: a game draws from generators of its own, so that its seed and the moves decide the episode; and in a game of
two no move pays more than losing that the game cannot read.
"""

import copy
import math
import random
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from custom.adapters.base import Adapter, Step
from custom.adapters.opponents import OPPONENTS, Opponent, draw_moves, opponent_maker
from custom.env import MAX_OBSERVATION_CHARS, BadEnvironment, OwnGenerators, cut_middle, shown

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
