"""verl's `torch_functional`: masked maths, log-probs, padding and schedules under one import path.

Each stands in a file of its own; code of this project imports it from there.
"""

from training.batch.head import entropy_from_logits as entropy_from_logits
from training.batch.head import logprobs_from_logits as logprobs_from_logits
from training.batch.masked_ops import clip_by_value as clip_by_value
from training.batch.masked_ops import masked_mean as masked_mean
from training.batch.masked_ops import masked_sum as masked_sum
from training.batch.masked_ops import masked_var as masked_var
from training.batch.masked_ops import masked_whiten as masked_whiten
from training.batch.schedules import (
    get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
)
from training.batch.schedules import (
    get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
)
from training.batch.schedules import get_wsd_schedule_with_warmup as get_wsd_schedule_with_warmup
from training.batch.sequence_padding import get_response_mask as get_response_mask
from training.batch.sequence_padding import pad_2d_list_to_length as pad_2d_list_to_length
from training.batch.sequence_padding import pad_sequence_to_length as pad_sequence_to_length
from training.batch.sequence_padding import postprocess_data as postprocess_data
