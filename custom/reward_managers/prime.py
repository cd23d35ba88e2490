"""The prime reward manager: a function scores rows side by side, in processes with a deadline.

Invariant: whatever the function does to its process, the batch is scored: a row that hangs, or ends
its process, scores 0. The processes end with the manager, and with this process.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing import get_context
from typing import Any

from pebble import ProcessExpired, ProcessPool

from custom.env import RewardFunctionRaised
from custom.model_usage import USAGE
from custom.reward_managers.naive import NaiveRewardManager, RewardSample
from custom.reward_managers.prime_process import Scored, begin_process, score_from_file
from custom.reward_managers.registry import register_reward_manager
from custom.side_services import installed_services
from data.watchdog import beat

logger = logging.getLogger(__name__)


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores rows side by side in processes, for functions that compute long, or may hang.

    A row that takes longer than its deadline, or whose process dies, scores 0, and another process
    takes its place. `compute_score` stands at the top level of a file, which each process loads for
    itself.

    Args:
        num_processes: at work at once; None: as many as there are cores.
        timeout_s: the deadline of one row, in seconds.
        args, kwargs: as of NaiveRewardManager.
    """

    def __init__(
        self, *args: Any, num_processes: int | None = None, timeout_s: float = 300.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        function = self.compute_score
        if isinstance(function, partial):
            self.reward_kwargs = {**function.keywords, **self.reward_kwargs}
            function = function.func
        self.function_name = getattr(function, "__name__", "")
        self.function_file = _file_of(function, self.function_name)
        self.timeout_s = timeout_s
        self.pool = ProcessPool(
            num_processes or os.cpu_count() or 1,
            # Fresh processes: a fork of this one would have its models' threads half.
            context=get_context("spawn"),
            initializer=begin_process,
            initargs=(installed_services(),),
        )
        # Starts the processes. Linux ends them with the thread that started them: let that be this
        # thread, and not one that scores a batch beside the passes and then ends.
        self.pool.schedule(os.getpid)
        weakref.finalize(self, _end_pool, self.pool)

    def _score(self, samples: list[RewardSample]) -> list[Any]:
        futures = [self._schedule(sample) for sample in samples]
        results = []
        for sample, future in zip(samples, futures, strict=True):
            beat("the reward of a row began")
            results.append(self._result_of(sample, future))
        return results

    def _schedule(self, sample: RewardSample) -> Future[Scored]:
        arguments = {
            "data_source": sample.data_source,
            "solution_str": sample.solution_str,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }
        arguments.update(self.reward_kwargs)
        return self.pool.schedule(
            score_from_file,
            args=(self.function_file, self.function_name, arguments),
            timeout=self.timeout_s,
        )

    def _result_of(self, sample: RewardSample, future: Future[Scored]) -> Any:
        """Waits for a row's result; 0 where its process hung or died."""
        try:
            failure, result, usage = future.result()
        except (TimeoutError, ProcessExpired) as error:
            # As text: a record that held the error would hold this manager by its traceback.
            problem = repr(error)
            logger.warning(
                "%s scores 0: %s within %g s", sample.describe(), problem, self.timeout_s
            )
            return 0.0
        USAGE.add(usage)
        if failure:
            what, _, trace = failure.partition("\n")
            raise RewardFunctionRaised(
                f"{self.score_name} failed with {what} on {sample.describe()}"
            ) from RuntimeError(f"in its process\n{trace}")
        return result


def _file_of(function: Callable[..., Any], name: str) -> str:
    """Returns the file in which another process can find the function by its name."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not file or getattr(module, name, None) is not function:
        raise ValueError(
            f"reward_manager=prime: {function!r} must stand in a file, at its top level by its name"
        )
    return str(file)


def _end_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
