"""How a batch is cut, grouped and reduced, with the names by which verl's users know it."""

from training.batch.batching import ceildiv, get_seqlen_balanced_partitions, karmarkar_karp, roundup_divisible
from training.batch.torch_functional import clip_by_value, masked_mean, masked_var, masked_whiten
from training.batch.verl_names import (
    distributed_masked_mean,
    distributed_mean_max_min_std,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_response_mask,
    get_reverse_idx,
    get_wsd_schedule_with_warmup,
    log_seqlen_unbalance,
    logprobs_from_logits,
    masked_sum,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
