"""Engines that have ranks of their own, behind the calls of engines that share the policy's.

Several threads may have batches played at once; new weights come between two slices of play.
Invariant: a batch that is handed in, and weights that are to be sent, wait for one slice at most,
however many threads play.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from typing import Any

from custom.agent import AgentSpec
from data.protocol import DataProto
from training.run.worker_group_protocol import EngineGroup, Metrics, PolicyGroup

# Seconds for which engines play on before new weights, or another batch, may reach them.
SLICE_S = 0.2


class DedicatedEngines:
    """Plays batches on the engines' ranks, and brings them the policy's weights over a channel.

    A thread plays on under `_lock`, with the batches of all threads. `_gate` is held by whoever is
    to have the lock next, a new batch or new weights: threads that play pass it before each slice.

    Args:
        engines: the group of ranks that hold engines.
        policy: the group whose weights they get.
    """

    def __init__(self, engines: EngineGroup, policy: PolicyGroup) -> None:
        self.engines = engines
        self.policy = policy
        # Each batch is cut into a piece an engine.
        self.pieces = engines.world_size // engines.ranks_per_engine()
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._batch_numbers = itertools.count()
        # By batch number: the pieces that have ended, by the rank that played them.
        self._ended: dict[int, dict[int, DataProto]] = defaultdict(dict)
        self._channel_threads = ThreadPoolExecutor(2, thread_name_prefix="weights")
        self._join_channel()

    def _join_channel(self) -> None:
        """Lets the policy's first rank and all engines meet; each side's call awaits the other."""
        address = self.policy.open_weight_channel()
        size = self.engines.world_size + 1
        _, self.manifest = self._at_once(
            partial(self.engines.join_weight_channel, address, size),
            partial(self.policy.join_weight_channel, address, size),
        )

    def _at_once(
        self, of_engines: Callable[[], Any], of_policy: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Makes two calls that await each other; returns both answers.

        Raises what the first that fails raises: the other then fails, or waits, for want of it.
        """
        calls = [self._channel_threads.submit(call) for call in (of_engines, of_policy)]
        for call in as_completed(calls):
            call.result()
        answer_of_engines, answer_of_policy = (call.result() for call in calls)
        return answer_of_engines, answer_of_policy

    @property
    def world_size(self) -> int:
        """Counts the engines' ranks."""
        return self.engines.world_size

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers prompts, beside the batches of other threads."""
        return self._play_to_its_end(prompts)

    def run_episodes(self, described: DataProto) -> DataProto:
        """Plays episodes, beside the batches of other threads."""
        return self._play_to_its_end(described)

    def _play_to_its_end(self, described: DataProto) -> DataProto:
        with self._gate, self._lock:
            number = next(self._batch_numbers)
            meta_info = described.meta_info | {"number": number}
            self.engines.begin_batch(replace(described, meta_info=meta_info))
        while True:
            # Whoever holds the gate goes first.
            with self._gate:
                pass
            with self._lock:
                if len(self._ended[number]) == self.pieces:
                    pieces = self._ended.pop(number)
                    return DataProto.concat([piece for _, piece in sorted(pieces.items())])
                self._play_slice()

    def _play_slice(self) -> None:
        """Plays on with all threads' batches, and keeps what has ended."""
        seconds = [SLICE_S] * self.world_size
        to_idle = [False] * self.world_size
        for rank, ended in enumerate(self.engines.play(seconds, to_idle)):
            for piece in ended:
                number = piece.meta_info.pop("number")
                self._ended[number][rank] = piece

    def sync_weights(self, version: int) -> Metrics:
        """Sends the policy's weights to the engines; returns probes' metrics."""
        with self._gate, self._lock:
            _, seen = self._at_once(
                partial(self.engines.receive_weights, self.manifest, version),
                self.policy.send_weights,
            )
            return self.engines.probe_weights(seen)

    def sleep_rollout(self) -> None:
        """Returns at once: nobody else needs the engines' memory."""

    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine."""
        self.engines.start_agents(specs)

    def close_agents(self) -> None:
        """Closes the environment pools."""
        self.engines.close_agents()

    def begin_batch(self, described: DataProto) -> None:
        """Takes a batch in that the caller itself plays on with."""
        self.engines.begin_batch(described)

    def play(self, seconds: list[float], to_idle: list[bool]) -> list[list[DataProto]]:
        """Plays on with what `begin_batch` took in."""
        return self.engines.play(seconds, to_idle)
