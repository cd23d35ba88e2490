"""Steps that are generated before their turn, in threads, while another step is trained on.

Invariant: what was generated but not trained on goes with a checkpoint, or is generated again from
the same rows and seeds: no row of the data is lost or comes twice.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from data.protocol import DataProto
from training.async_rollout.staleness import mask_stale_groups
from training.config import PPOConfig
from training.run.checkpoint_contents import load_in_flight
from training.run.data_position import DataPosition, Rows, RowStream
from training.run.step_source import Generate, GeneratedStep, Metrics, PendingStep


class Prefetch:
    """Generates steps at most `trainer.async_level` before the one that is trained on.

    Args:
        config: the run's.
        row_stream: where each step's rows are drawn from.
        generate: makes a step's batch of its rows; called in the threads.
        on_restored: sees each batch that a checkpoint had in flight.
    """

    def __init__(
        self,
        config: PPOConfig,
        row_stream: RowStream,
        generate: Generate,
        on_restored: Callable[[DataProto], None],
    ) -> None:
        self.level = config.trainer.async_level
        self.deterministic = config.trainer.deterministic
        self.row_stream = row_stream
        self.generate = generate
        self.on_restored = on_restored
        # Dynamic sampling draws further rows as it goes, before the next step draws its own.
        self.draws_while_generating = config.algorithm.filter_groups.enable
        one_at_a_time = self.deterministic or self.draws_while_generating
        threads = 1 if one_at_a_time else self.level + 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="generation")
        self._begun: deque[Future[GeneratedStep]] = deque()

    def next_step(self, step: int, last: int) -> PendingStep:
        """Begins the steps behind this one, as far as level and run allow, and returns this one."""
        while len(self._begun) <= self.level and step + len(self._begun) <= last:
            self._begun.append(self._begin(step + len(self._begun)))
        return self._begun.popleft()

    def _begin(self, step: int) -> Future[GeneratedStep]:
        if self.draws_while_generating:
            return self._threads.submit(self._draw_and_generate, step)
        rows = self.row_stream.draw(step)
        return self._threads.submit(self._generate, rows, step, self.row_stream.position)

    def _generate(self, rows: Rows, step: int, position: DataPosition) -> GeneratedStep:
        batch, metrics = self.generate(rows, step)
        return GeneratedStep(batch, metrics, position)

    def _draw_and_generate(self, step: int) -> GeneratedStep:
        batch, metrics = self.generate(self.row_stream.draw(step), step)
        return GeneratedStep(batch, metrics, self.row_stream.position)

    def mask_stale_groups(self, batch: DataProto, step: int) -> Metrics:
        """Masks groups with a token older than the level; see `staleness.mask_stale_groups`."""
        # A batch of a user's own may not say what sampled it.
        if "weight_versions" not in batch.batch:
            return {}
        return mask_stale_groups(batch, step, self.level)

    def wait_for_begun_steps(self) -> None:
        """Waits, in a deterministic run: there new weights come between two batches."""
        if self.deterministic:
            wait(self._begun)

    def in_flight(self) -> tuple[Future[GeneratedStep], ...]:
        """Returns the steps that have begun, in order."""
        return tuple(self._begun)

    def restore(self, checkpoint: Path) -> None:
        """Takes over the steps in flight of a checkpoint, and draws the rows behind them next."""
        self._begun.clear()
        for step in load_in_flight(checkpoint):
            generated: Future[GeneratedStep] = Future()
            generated.set_result(step)
            self._begun.append(generated)
            self.row_stream.seek(step.position)
            self.row_stream.take_back(step.batch)
            self.on_restored(step.batch)

    def shutdown(self) -> None:
        """Cancels the steps that have not begun, and waits for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)
