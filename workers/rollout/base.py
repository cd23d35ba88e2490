"""SHIM: the turn loop stands in turn_loop.py, the base class of engines in base_rollout.py."""

from workers.rollout.base_rollout import BaseRollout as BaseRollout
from workers.rollout.base_rollout import start_episodes as start_episodes
from workers.rollout.base_rollout import turn_seed as turn_seed
from workers.rollout.turn_loop import Batch as Batch
from workers.rollout.turn_loop import TurnLoop as TurnLoop
