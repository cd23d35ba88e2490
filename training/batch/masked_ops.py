"""Offers the masked maths of training.core_algos.masked_ops under the name that batches know it by.

Code of this project imports it from there.
"""

from training.core_algos.masked_ops import at_least_float32 as at_least_float32
from training.core_algos.masked_ops import clip_by_value as clip_by_value
from training.core_algos.masked_ops import masked_mean as masked_mean
from training.core_algos.masked_ops import masked_range as masked_range
from training.core_algos.masked_ops import masked_sum as masked_sum
from training.core_algos.masked_ops import masked_var as masked_var
from training.core_algos.masked_ops import masked_whiten as masked_whiten
from training.core_algos.masked_ops import sampled_sums as sampled_sums
