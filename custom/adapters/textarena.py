"""SHIM: moved to contrib/adapters."""

from contrib.adapters.textarena import TextArenaEnvironment as TextArenaEnvironment
from contrib.adapters.textarena_opponents import PolicyOpponent as PolicyOpponent
from contrib.adapters.textarena_opponents import draw_moves as draw_moves
