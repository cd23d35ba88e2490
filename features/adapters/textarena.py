"""textarena's games for one player, or for two against an opponent, as environments.

Invariant: an episode has a game object and generators of its own, so that its seed and the moves
decide it, whatever was played before; and in a game of two no move pays more than losing that the
game cannot read.
"""

import copy
import math
import random
from contextlib import suppress
from itertools import islice
from typing import Any

from custom.env import BadEnvironment
from custom.env_calls import MAX_OBSERVATION_CHARS, cut_middle, shown
from custom.own_generators import OwnGenerators
from data.seeds import seed_beside
from features.adapters.base import Adapter, Step
from features.adapters.textarena_opponents import OPPONENTS, Opponent, draw_moves, opponent_maker

# The policy's number, who is the first, and the opponent's.
PLAYER = 0
OTHER = 1
# Moves that are tried on a copy of the game until one is allowed.
TRIES = 500
# A game in which the opponent moves so often in a row will not come back.
MOST_OPPONENT_MOVES = 200
# Unreadable moves in a row that end the game.
MOST_UNREADABLE = 2
# Entries of a list or table of the game's that no move changes.
LARGE_TABLE = 1000
# Characters of a game's words that moves are drawn from, and of an exception that are shown.
LATEST_CHARS = 2000
MAX_ERROR_CHARS = 200
UNREADABLE = "The game cannot read that move."


class TextArenaEnvironment(Adapter):
    """Plays `textarena:ID`: a game for one or two players that needs no network and no model.

    Args:
        identifier: such as "GuessTheNumber-v0", or "TicTacToe-v0" with an opponent.
        prompt_template: fields {name}, {observation}, the game's own instructions.
        invalid_reward: reward of a game that ends by a second invalid move in a row; None: the
            game's own, which pays for quitting in some (Mastermind 0.75 for one guess). In a game
            of two it is a loss, -1, or less.
        opponent: who plays second in a game of two: "random" (allowed moves), "FILE.py:NAME" or
            "PACKAGE.MODULE:NAME" (a function of the observation, or a class built for each
            episode), "hf:FOLDER".
        kwargs: go to the game, such as max_turns.
    Each observation holds what the game has said since the last; the reward comes at the end of the
    game, in a game of two usually 1, 0 or -1. Where the opponent's move was invalid it tries again,
    or loses, as the game has it; one at which the game raises ends it, paying nothing. `max_turns`
    of a game of two counts both players' moves. In a thread, other threads that draw from the
    global generators meanwhile change the game.
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
            # Never reset: some games keep what an episode did to them (a shuffled deck, pieces on
            # the board), so that each is played on a copy.
            self.pristine = textarena.make(identifier, **self.settings)
            self.tables = _flat_tables(unwrapped(self.pristine))
            trial = unwrapped(self._copy_of_pristine())
            self.players = _count_players(trial, textarena.SinglePlayerState)
        if (self.players == 2) != (opponent is not None):
            raise ValueError(
                f"it is a game of {self.players}, given {opponent=}; "
                f"for two players allowed: {OPPONENTS}"
            )
        self.make_opponent = opponent_maker(opponent) if opponent else None
        self.invalid_reward = invalid_reward
        if self.players == 2:
            # No such move pays more than losing.
            self.invalid_reward = min(-1.0, invalid_reward or 0.0)
        turns = getattr(trial.state, "max_turns", None)
        # Some games notice their limit a move later.
        self.max_turns = turns + 1 if isinstance(turns, int) else None

    def start(self, seed: int) -> str:
        """Starts a new game and returns its instructions."""
        self.over = False
        # Unreadable moves of the player's in a row.
        self.unreadable = 0
        # The words of the game to each player.
        self.words = ["", ""]
        self.generators = OwnGenerators(seed)
        # The wrapped game reads actions; its observations would repeat the whole history.
        self.wrapped = self._copy_of_pristine()
        self.game = unwrapped(self.wrapped)
        with self.generators.installed():
            self.game.reset(num_players=self.players, seed=seed)
        self.opponent = self._opponent_of(seed)
        self._answer()
        return self.fill_prompt(observation=self._hear(PLAYER))

    def _copy_of_pristine(self) -> Any:
        """Makes a game that nothing has been played on; its large tables are copied one level."""
        copies = {id(table): copy.copy(table) for table in self.tables}
        return copy.deepcopy(self.pristine, copies)

    def _opponent_of(self, seed: int) -> Opponent:
        # The game draws from generators of `seed` itself: those would tell what it has hidden.
        own_seed = seed_beside(seed, "opponent")
        if self.make_opponent:
            return self.make_opponent(own_seed)
        generator = random.Random(own_seed)

        def random_opponent(observation: str) -> str:
            return self._draw_move(OTHER, generator) or "[pass]"

        return random_opponent

    def play(self, action: str) -> Step:
        """Plays one move, and the opponent's answer.

        The game itself says what was wrong with a move.
        """
        if not self.over:
            error = self._move(action)
            if error:
                return self._refuse_unreadable(error)
        self.unreadable = 0
        info: dict[str, Any] = {"valid": self.over or not _is_invalid(self.game, PLAYER)}
        self._answer()
        if not self.over:
            return self._hear(PLAYER), 0.0, False, info
        return self._finish(info)

    def _refuse_unreadable(self, error: str) -> Step:
        """Answers a move at which the game raised; the second in a row ends the game."""
        self.unreadable += 1
        info = {"valid": False, "error": error}
        if self.unreadable < MOST_UNREADABLE:
            return UNREADABLE, 0.0, False, info
        return UNREADABLE, self.invalid_reward or 0.0, True, info

    def _finish(self, info: dict[str, Any]) -> Step:
        """Returns the last step of a game that is over, with its reward."""
        rewards, infos = self.game.close()
        player_info = infos.get(PLAYER, {})
        reward = (rewards or {}).get(PLAYER, 0.0)
        # Some games have the reason in the reward's place.
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            reward = 0.0
        if player_info.get("invalid_move", False):
            info["valid"] = False
            if self.invalid_reward is not None:
                reward = self.invalid_reward
        text = f"{self._hear(PLAYER)}\n{player_info.get('reason') or ''}".strip()
        return text, float(reward), True, info

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns a move that the game allows now, tried on a copy of it; None: none was found."""
        if self._done or self.over:
            return None
        return self._draw_move(PLAYER, generator)

    def _answer(self) -> None:
        """Plays the opponent's moves until it is the player's turn or the game ends."""
        for _ in range(MOST_OPPONENT_MOVES):
            if self.players == 1 or self.over or self.game.state.current_player_id == PLAYER:
                return
            heard = cut_middle(self._hear(OTHER), MAX_OBSERVATION_CHARS) or UNREADABLE
            move = self.opponent(heard)
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

    def _move(self, action: str) -> str:
        """Plays a move of whose turn it is; returns what the game raised, empty if nothing."""
        with self.generators.installed():
            over, error = _step(self.wrapped, action)
        if not error:
            self.over = over
        return error

    def _draw_move(self, player: int, generator: random.Random) -> str | None:
        """Draws moves until one is allowed on a copy of the game; None: none was found."""
        state = self.game.state
        latest = "\n".join(str(text) for _, text, _ in state.observations[player])
        if not latest:
            latest = self.words[player][-LATEST_CHARS:]
        shared = self._shared_with_copies()
        moves = draw_moves(self.words[player] + latest, latest, generator)
        for move in islice(moves, TRIES):
            trial = copy.deepcopy(self.wrapped, dict(shared))
            # A copy does not move the game's own generators on.
            with OwnGenerators(0).installed():
                _, error = _step(trial, move)
            if not error and not _is_invalid(trial, player):
                return move
        return None

    def _shared_with_copies(self) -> dict[int, Any]:
        """Returns, by id, what stands for parts of the game in its copies, and is not copied."""
        shared: dict[int, Any] = {}
        # Word lists and other large tables are not changed by a move.
        for value in vars(self.game).values():
            if _is_large(value):
                shared[id(value)] = value
        # A copy begins with an empty log.
        shared[id(self.game.state.logs)] = []
        return shared

    def _hear(self, player: int) -> str:
        """Returns what the game, and the other player, have said to the player since the last call.

        It is added to the player's `words`.
        """
        state = self.game.state
        if state.current_player_id == player:
            _, messages = self.game.get_observation()
        else:
            messages = state.observations[player]
            state.observations[player] = []
        lines = []
        for sender, text, _ in messages:
            if sender == player:
                continue
            if isinstance(sender, int) and sender >= 0:
                name = state.role_mapping.get(sender, sender)
                lines.append(f"[{name}] {text}")
            else:
                lines.append(str(text))
        heard = "\n".join(lines).strip()
        self.words[player] += f"{heard}\n"
        return heard


def unwrapped(game: Any) -> Any:
    """Returns the game within textarena's wrappers."""
    import textarena

    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game


def _flat_tables(game: Any) -> list[Any]:
    """Returns the game's large tables whose entries cannot change, such as lists of words."""
    return [table for table in vars(game).values() if _is_large(table) and _is_flat(table)]


def _is_large(value: Any) -> bool:
    return isinstance(value, list | dict | set | tuple) and len(value) > LARGE_TABLE


def _is_flat(table: Any) -> bool:
    """Checks whether no entry, of a dict no value, can change."""
    entries = table.values() if isinstance(table, dict) else table
    return all(_is_constant(entry) for entry in entries)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(entry) for entry in value)
    return isinstance(value, str | int | float)


def _step(game: Any, action: str) -> tuple[bool, str]:
    """Steps a game; returns whether it is over, and what it raised, empty if nothing."""
    try:
        return bool(game.step(action)[0]), ""
    # Games trip over texts that they do not expect.
    except Exception as error:
        return False, repr(error)[:MAX_ERROR_CHARS]


def _is_invalid(game: Any, player: int) -> bool:
    """Checks whether the last move, the player's, was invalid."""
    state = game.state
    lost_by_it = state.game_info.get(player, {}).get("invalid_move", False)
    return bool(lost_by_it or (state.error_count and not state.done))


def _count_players(game: Any, single_player_state: type) -> int:
    """Resets the game for one player, else for two; raises what the game raises at that."""
    with suppress(AssertionError, ValueError):
        game.reset(num_players=1, seed=0)
        if isinstance(game.state, single_player_state):
            return 1
    game.reset(num_players=2, seed=0)
    return 2
