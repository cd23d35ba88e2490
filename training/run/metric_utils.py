"""verl's `metric_utils`: metrics of a step and of validation under one import path.

Each stands in a file of its own; code of this project imports it from there.
"""

from training.run.metrics.step_metrics import compute_data_metrics as compute_data_metrics
from training.run.metrics.step_metrics import (
    compute_throughout_metrics as compute_throughout_metrics,
)
from training.run.metrics.step_metrics import compute_timing_metrics as compute_timing_metrics
from training.run.metrics.step_metrics import reduce_metrics as reduce_metrics
from training.run.metrics.validation_metrics import bootstrap_metric as bootstrap_metric
from training.run.metrics.validation_metrics import calc_maj_val as calc_maj_val
from training.run.metrics.validation_metrics import (
    process_validation_metrics as process_validation_metrics,
)
