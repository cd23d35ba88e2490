"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and the registries of a user's own."""

# ruff: noqa: F403
from training.core_algos.advantages import *
from training.core_algos.group_advantages import *
from training.core_algos.kl_and_values import *
from training.core_algos.policy_losses import *
