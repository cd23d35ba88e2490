"""Lists the methods that the driver calls on a worker group, by the group's role.

A local group, a group of Ray's, dedicated engines and group streaming all offer these methods;
`workers/fsdp_workers.py` has what they do. Invariant: the driver calls nothing of a group that does
not stand here.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from custom.agent import AgentSpec
from data.protocol import DataProto
from training.config import BatchPlan

Metrics = dict[str, float]


class RolloutGroup(Protocol):
    """Engines that answer prompts and play episodes."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every prompt, in order."""
        ...

    def run_episodes(self, described: DataProto) -> DataProto:
        """Plays the described episodes; `start_agents` comes first."""
        ...

    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine."""
        ...

    def close_agents(self) -> None:
        """Closes the environment pools."""
        ...

    def sync_weights(self, version: int) -> Metrics:
        """Brings the policy's weights to the engines; returns probes' metrics."""
        ...

    def sleep_rollout(self) -> None:
        """Gives the engines' memory to those that train on the same ranks."""
        ...


class PlayingGroup(RolloutGroup, Protocol):
    """Engines whose batches the driver plays on with, a slice of time at a time."""

    @property
    def world_size(self) -> int:
        """Counts the ranks."""
        ...

    def begin_batch(self, described: DataProto) -> None:
        """Takes prompts or episodes in, which `play` goes on with."""
        ...

    def play(self, seconds: list[float], to_idle: list[bool]) -> list[list[DataProto]]:
        """Plays on, on each rank for so many seconds; returns each rank's ended batches."""
        ...


class TrainedGroup(Protocol):
    """A model that is trained, which a checkpoint has a folder for."""

    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads the model."""
        ...

    def save_checkpoint(self, folder: str) -> None:
        """Begins to write the model's folder of a checkpoint."""
        ...

    def checkpoint_written(self, wait: bool) -> bool:
        """Checks whether that folder is written; waits for it where asked to."""
        ...

    def load_checkpoint(self, folder: str) -> None:
        """Reads that folder."""
        ...

    def take_probe_records(self) -> list[dict[str, Any]]:
        """Returns each rank's records of the last update, by probe."""
        ...


class ReferenceGroup(Protocol):
    """The frozen policy that KL terms compare with."""

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes `ref_log_prob` (B, R)."""
        ...


class PolicyGroup(TrainedGroup, ReferenceGroup, PlayingGroup, Protocol):
    """The policy: trained, and sampled from where it shares its ranks with engines."""

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Computes `old_log_probs` and `entropys`, (B, R) each."""
        ...

    def update_actor(self, data: DataProto) -> Metrics:
        """Makes a step's updates of the policy."""
        ...

    def update_actor_and_values(self, data: DataProto) -> Metrics:
        """Makes a step's updates of a policy that has the values too."""
        ...

    def ask_companion(self, data: DataProto) -> DataProto:
        """Asks what a feature keeps beside the policy about rows; meta_info names it."""
        ...

    def add_groups(self, data: DataProto) -> None:
        """Adds the gradient of some of a step's groups."""
        ...

    def finish_update(self) -> Metrics:
        """Makes the update of the gradients that were added."""
        ...

    def open_weight_channel(self) -> tuple[str, int]:
        """Opens the store at which the weight channel's ranks meet."""
        ...

    def join_weight_channel(self, address: tuple[str, int], size: int) -> Any:
        """Joins the weight channel; returns the manifest of what the policy sends."""
        ...

    def send_weights(self) -> dict[str, Tensor]:
        """Sends the weights over the channel; returns what probes saw of the policy, by probe."""
        ...


class EngineGroup(PlayingGroup, Protocol):
    """Ranks that hold engines alone; their weights come over a channel."""

    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Builds the engines."""
        ...

    def ranks_per_engine(self) -> int:
        """Counts the ranks that share an engine."""
        ...

    def join_weight_channel(self, address: tuple[str, int], size: int) -> Any:
        """Joins the weight channel."""
        ...

    def receive_weights(self, manifest: Any, version: int) -> None:
        """Takes the policy's weights from the channel."""
        ...

    def probe_weights(self, seen: dict[str, Tensor]) -> Metrics:
        """Compares what probes see of the engines with what they saw of the policy."""
        ...


class CriticGroup(TrainedGroup, Protocol):
    """The value model."""

    def compute_values(self, data: DataProto) -> DataProto:
        """Computes `values` (B, R)."""
        ...

    def update_critic(self, data: DataProto) -> Metrics:
        """Makes a step's updates of the critic."""
        ...


class RewardModelGroup(Protocol):
    """A frozen model that scores responses."""

    def init_model(self) -> None:
        """Loads the model."""
        ...

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Computes `rm_scores` (B, R), each on its row's last sampled token."""
        ...
