"""SHIM: metrics by purpose."""

from training.run.abort_policy import EnvironmentsFail as EnvironmentsFail
from training.run.abort_policy import FailureWatch as FailureWatch
from training.run.abort_policy import by_group as by_group
from training.run.abort_policy import require_same_tasks as require_same_tasks
from training.run.abort_policy import warn_of_crashing_groups as warn_of_crashing_groups
from training.run.episode_records import dump as dump
from training.run.episode_records import readable_rows as readable_rows
from training.run.episode_records import strict_json as strict_json
from training.run.episode_records import write_episodes as write_episodes
from training.run.metrics.episode_metrics import environment_metrics as environment_metrics
from training.run.metrics.episode_metrics import episode_metrics as episode_metrics
from training.run.metrics.episode_metrics import tool_metrics as tool_metrics
from training.run.metrics.step_metrics import compute_data_metrics as compute_data_metrics
from training.run.metrics.step_metrics import (
    compute_throughout_metrics as compute_throughout_metrics,
)
from training.run.metrics.step_metrics import compute_timing_metrics as compute_timing_metrics
from training.run.metrics.step_metrics import reduce_metrics as reduce_metrics
from training.run.metrics.validation_metrics import bootstrap_metric as bootstrap_metric
from training.run.metrics.validation_metrics import calc_maj_val as calc_maj_val
from training.run.metrics.validation_metrics import (
    flatten_validation_metrics as flatten_validation_metrics,
)
from training.run.metrics.validation_metrics import (
    process_validation_metrics as process_validation_metrics,
)
from training.run.step_timer import StepTimer as StepTimer
from training.validation import validate as validate
