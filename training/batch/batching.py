"""verl's `seqlen_balancing` and dynamic batches under one import path.

Each stands in a file of its own; code of this project imports it from there.
"""

from training.batch.micro_batches import get_reverse_idx as get_reverse_idx
from training.batch.micro_batches import prepare_dynamic_batch as prepare_dynamic_batch
from training.batch.micro_batches import rearrange_micro_batches as rearrange_micro_batches
from training.batch.micro_batches import restore_dynamic_batch as restore_dynamic_batch
from training.batch.rank_layout import ceildiv as ceildiv
from training.batch.rank_layout import (
    get_seqlen_balanced_partitions as get_seqlen_balanced_partitions,
)
from training.batch.rank_layout import karmarkar_karp as karmarkar_karp
from training.batch.rank_layout import log_seqlen_unbalance as log_seqlen_unbalance
from training.batch.rank_layout import roundup_divisible as roundup_divisible
