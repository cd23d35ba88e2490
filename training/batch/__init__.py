"""How a batch is cut, grouped and reduced; with verl's names for it."""

from training.batch.batching import (
    ceildiv,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    roundup_divisible,
)
from training.batch.verl_names import (
    get_reverse_idx,
    log_seqlen_unbalance,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
