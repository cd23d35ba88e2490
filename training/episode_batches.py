"""The parts that trainers of episodes share: rows that are tasks, rewards, the end of environments.

Invariant: it reads batches and rows alone; who plays, and what is trained, is the trainer's.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from custom.env_calls import call_method
from data.array_ops import object_array
from data.batch_fields import GIVEN_FIELDS
from data.learning_sampler import GivenTask
from data.own_names import keep_own
from data.protocol import DataProto
from data.texts import text_of
from training.run.data_position import Rows
from training.run.metrics.episode_metrics import episode_metrics
from workers.multi_turn_rollout import SyncMultiTurnRollout
from workers.rollout.episode_descriptions import describe_episodes

logger = logging.getLogger(__name__)

# In collated rows, beside their tasks: what was given in the place of rows.
GIVEN_TASK = "given_task"
# Seconds for the environments to be closed at a run's end.
CLOSING_S = 15.0


def environment_rewards(data: DataProto) -> Tensor:
    """Returns the environments' rewards, (B, R), each on the last sampled token of its turn."""
    data.require("environment_rewards", by="environment_rewards")
    return data.batch["environment_rewards"]


def as_tasks(rows: Sequence[Any]) -> Rows:
    """Collates a dataset's rows, which are the environment's tasks.

    A number stands for an episode without a task, a `GivenTask` for itself.
    """
    given = [row if isinstance(row, GivenTask) else GivenTask(row=row) for row in rows]
    tasks = [dict(each.row) if isinstance(each.row, Mapping) else {} for each in given]
    columns: Rows = {"task": object_array(tasks)}
    if any(each.seed is not None or each.environment is not None for each in given):
        columns[GIVEN_TASK] = object_array(given)
    return columns


def given_tasks(columns: Mapping[str, Any], samples: int = 1) -> list[GivenTask]:
    """Returns what `as_tasks` was given in the place of rows, one for each group; [] for rows."""
    return list(columns[GIVEN_TASK][::samples]) if GIVEN_TASK in columns else []


def add_row_columns(described: DataProto) -> None:
    """Adds the tasks' columns to the described episodes, as a reward manager reads them.

    What the description has keeps its value, but for `data_source`, which is the row's; a row's own
    column of such a name is called `own_NAME`.
    """
    columns = described.non_tensor_batch
    tasks = columns["task"]
    # A dict keeps the order in which columns appear.
    names = dict.fromkeys(name for task in tasks for name in task)
    own = {name: object_array([task.get(name) for task in tasks]) for name in names}
    taken = (columns.keys() | GIVEN_FIELDS) - {"data_source"}
    columns |= keep_own(own, taken, "the dataset's rows: a column")


def described(prompts: DataProto, samples: int, first_group: int, *, rollout: Any) -> DataProto:
    """Describes the episodes of a step's prompts for a rollout that a trainer's subclass made.

    They are what its `reset()` then takes, and keep the prompts' columns. For any other rollout
    the prompts themselves are returned.
    """
    if not isinstance(rollout, SyncMultiTurnRollout):
        return prompts
    columns = prompts.non_tensor_batch
    episodes = describe_episodes(
        len(prompts) // samples,
        samples,
        prompts.meta_info,
        first_group=first_group,
        suite=rollout.suite,
        tasks=list(columns["task"][::samples]) if "task" in columns else [],
        given=given_tasks(columns, samples),
    )
    for name, column in columns.items():
        if name == GIVEN_TASK:
            continue
        if name not in episodes.non_tensor_batch or name == "data_source":
            episodes.non_tensor_batch[name] = column
    rollout.wanted = episodes
    return episodes


def metrics_of_episodes(rollout: Any, step: int) -> dict[str, float]:
    """Returns the metrics of a step's episodes where these were not asked for before, else none."""
    if not isinstance(rollout, SyncMultiTurnRollout):
        return {}
    episodes = rollout.take_facts(step=step)
    return episode_metrics(episodes, rollout.suite.names) if episodes else {}


def close_environments(rollout: Any) -> None:
    """Closes a rollout's environments, if there are any, and waits at most CLOSING_S seconds."""
    if rollout is None:
        return

    def close() -> None:
        try:
            call_method(rollout, "close")
        # A worker may be gone.
        except Exception as error:
            logger.warning("environments were not closed: %s", text_of(error))

    # Workers that are busy, or gone, close nothing; their environments then end with them.
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(CLOSING_S)
