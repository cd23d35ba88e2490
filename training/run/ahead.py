"""Engines with ranks of their own, and steps that are generated ahead while another is trained on.

Version v of the weights is what step v leaves behind. Invariant: no token that a step trains on is of weights older
than `trainer.async_level` updates, and what was generated but not trained on goes with a checkpoint, or is sampled
again from the same seeds: no row of the data is lost or comes twice.
"""

import itertools
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.containers import object_array
from data.protocol import DataProto
from training.batch.torch_functional import masked_mean
from training.run.metric_utils import StepTimer

# For so many seconds engines play before new weights, or another batch, may reach them.
SLICE_S = 0.2
FOLDER = "in_flight"


class Engines:
    """Is the worker group of engines that have ranks of their own; its methods are this object's.

    Batches are played for several threads at once; whichever has the lock goes on with all of them. Who holds the gate
    is next: a new batch, or new weights.
    """

    def __init__(self, group: Any, policy: Any) -> None:
        self.group, self.policy = group, policy
        self.pieces = group.world_size // group.ranks_per_engine()
        self.numbers, self.lock, self.gate = itertools.count(), threading.Lock(), threading.Lock()
        self.played: dict[int, dict[int, DataProto]] = defaultdict(dict)
        self.side = ThreadPoolExecutor(1, thread_name_prefix="weights")
        address = policy.open_weight_channel()
        joined = self.side.submit(group.join_weight_channel, address, group.world_size + 1)
        self.manifest = policy.join_weight_channel(address, group.world_size + 1)
        joined.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def generate_sequences(self, described: DataProto) -> DataProto:
        """Plays a batch, prompts or episodes, beside those of other threads."""
        with self.gate, self.lock:
            number = next(self.numbers)
            self.group.begin_batch(
                replace(described, meta_info=described.meta_info | {"number": number})
            )
        while True:
            with self.gate:
                pass
            with self.lock:
                if len(self.played[number]) == self.pieces:
                    return DataProto.concat(
                        [part for _, part in sorted(self.played.pop(number).items())]
                    )
                for rank, parts in enumerate(self.group.play([SLICE_S] * self.group.world_size)):
                    for part in parts:
                        self.played[part.meta_info.pop("number")][rank] = part

    run_episodes = generate_sequences

    def sync_weights(self, version: int) -> dict[str, float]:
        """Sends the policy's weights to the engines; returns what the canaries tell."""
        with self.gate, self.lock:
            received = self.side.submit(self.group.receive_weights, self.manifest, version)
            told = self.policy.send_weights()
            received.result()
            return self.group.compare_canary(told)


class Streamed:
    """Is a worker group whose policy learns of each group of episodes once it has ended, while others still play.

    On ranks that train too it learns where the engine has nothing to sample; engines with ranks of their own go on.
    """

    def __init__(self, group: Any, trainer: Any) -> None:
        self.group, self.trainer, self.learnt = group, trainer, list[DataProto]()
        self.apart = isinstance(group, Engines)
        self.side = ThreadPoolExecutor(1, thread_name_prefix="play")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.group, name)
        return (
            partial(self._play, method)
            if name in ("generate_sequences", "run_episodes")
            else method
        )

    def _play(self, whole: Callable[[DataProto], DataProto], described: DataProto) -> DataProto:
        """Plays prompts or episodes; those that are to be trained on are, and `finish` then makes the step."""
        if described.meta_info["validate"]:
            return whole(described)
        self.group.begin_batch(
            replace(described, meta_info=described.meta_info | {"by_group": True})
        )
        left, parts = (
            Counter(described.non_tensor_batch["uid"].tolist()),
            defaultdict[str, list[DataProto]](list),
        )
        uids, more = list(left), self._slice()
        while left:
            found = [part for own in more() for part in own]
            for part in found:
                parts[uid := part.meta_info.pop("uid")].append(part)
                left[uid] -= part.meta_info.pop("episodes")
            ended = [uid for uid in left if not left[uid]]
            left -= Counter()
            more = self._slice() if left else more
            if ended:
                self._learn(DataProto.concat([part for uid in ended for part in parts[uid]]))
        return DataProto.concat([part for uid in uids for part in parts[uid]])

    def _slice(self) -> Callable[[], list[list[DataProto]]]:
        """Goes on playing, beside what follows where it can; the result waits for what has ended."""
        size = self.group.world_size
        seconds = SLICE_S if size > 1 else math.inf
        play = partial(self.group.play, [seconds] * size, [not self.apart] * size)
        return self.side.submit(play).result if self.apart else play

    def _learn(self, ended: DataProto) -> None:
        batch, _ = self.trainer.with_advantages(ended, StepTimer())
        self.trainer.actor_rollout_wg.add_groups(batch)
        # Of those parts alone that have episodes of several rows.
        batch.batch.pop("episode_share", None)
        self.learnt.append(batch)

    def finish(self, timer: StepTimer) -> tuple[DataProto, dict[str, float]]:
        """Makes the step's update; returns its rows, in the order of their ends, and metrics."""
        names = {name for part in self.learnt for name in part.non_tensor_batch}
        for part, own in ((part, part.non_tensor_batch) for part in self.learnt):
            # A reward function may tell more of one group than of another.
            own |= {name: object_array([None] * len(part)) for name in names - own.keys()}
        batch, metrics = (
            DataProto.concat(self.learnt),
            {"training/parts_of_update": float(len(self.learnt))},
        )
        self.learnt.clear()
        with timer("update_actor"):
            return batch, metrics | self.trainer.actor_rollout_wg.finish_update()


class Generated(NamedTuple):
    """Holds what is there of a step before it is trained on: rows, metrics, and how far the data was drawn for it."""

    batch: DataProto
    metrics: dict[str, float]
    drawn_to: tuple[int, int]


class Ahead:
    """Generates a trainer's steps before their turn, in threads, at most `async_level` before the one trained on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.level, config = (
            trainer,
            trainer.config.trainer.async_level,
            trainer.config,
        )
        # One that draws further rows as it goes does so before the next step draws its own.
        self.draws = config.algorithm.filter_groups.enable
        threads = 1 if config.trainer.deterministic or self.draws else self.level + 1
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="generation")
        self.begun: deque[Future[Generated]] = deque()

    def take(self, step: int, last: int) -> Future[Generated]:
        """Returns the step's generation, once those behind it, up to the last step, have begun."""
        while len(self.begun) <= self.level and step + len(self.begun) <= last:
            given = None if self.draws else (self.trainer.next_rows(), self.trainer.drawn_to)
            self.begun.append(self.threads.submit(self._generate, step + len(self.begun), given))
        return self.begun.popleft()

    def _generate(self, step: int, given: tuple[Any, tuple[int, int]] | None) -> Generated:
        trainer = self.trainer
        rows, drawn_to = given or (trainer.next_rows(), None)
        batch, metrics = trainer.generate(rows, step)
        return Generated(batch, metrics, drawn_to or trainer.drawn_to)

    def restore(self, folder: Path) -> None:
        """Takes up what a checkpoint holds of steps that were generated ahead."""
        self.begun.clear()
        for path in sorted(folder.glob(f"{FOLDER}/*.pt")):
            batch, future = DataProto.load_from_disk(path), Future[Generated]()
            metrics, drawn_to = batch.meta_info.pop(FOLDER)
            self.trainer.drawn_to = (drawn_to[0], drawn_to[1])
            future.set_result(Generated(batch, metrics, self.trainer.drawn_to))
            self.begun.append(future)
            if (facts := batch.non_tensor_batch.get("episode_facts")) is not None:
                key = (False, batch.meta_info["global_steps"])
                self.trainer.multi_turn_rollout.facts[key] = [
                    fact for fact in facts if fact is not None
                ]


def save_in_flight(folder: Path, begun: Iterable[Future[Generated]]) -> None:
    """Writes the steps that are generated whole, up to the first that is not: that and the rest are sampled again."""
    for number, future in enumerate(
        itertools.takewhile(lambda one: one.done() and not one.exception(), begun)
    ):
        (folder / FOLDER).mkdir(exist_ok=True)
        batch, *rest = future.result()
        kept = replace(batch, meta_info=batch.meta_info | {FOLDER: rest})
        kept.save_to_disk(folder / FOLDER / f"{number:03d}.pt")


def leave_out_stale(batch: DataProto, step: int, level: int) -> dict[str, float]:
    """Measures how many updates ago each token was sampled; a group with a token older than `level` is masked."""
    mask, versions = batch.batch["response_mask"].bool(), batch.batch["weight_versions"]
    age, uids = torch.where(mask, step - 1 - versions, 0), batch.non_tensor_batch["uid"]
    stale = {
        uid for uid, oldest in zip(uids, age.amax(dim=1).tolist(), strict=True) if oldest > level
    }
    kept = torch.tensor([uid not in stale for uid in uids])
    batch.batch["response_mask"] = batch.batch["response_mask"] * kept[:, None]
    found = {
        "async/staleness_mean": masked_mean(age.float(), mask).item(),
        "async/staleness_max": float(age.max()),
    }
    return found | {"async/dropped_groups": float(len(stale))}
