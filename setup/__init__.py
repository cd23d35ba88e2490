"""The small Python API: `from setup import ...`; docs/python.md is its guide.

Invariant: every call ends in the code that `python main.py` runs.
"""

from custom.env import BaseEnvironment, EnvironmentConfig, Trajectory
from custom.envs.simple_game import SimpleGameEnvironment
from setup import algo
from setup.algo import PolicyValueModel, PPOBatch
from setup.env import *
from setup.inference import *
from setup.tools import *
from setup.trainer import *
