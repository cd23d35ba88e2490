"""SHIM: training.batch's modules by purpose."""

from training.batch.dynamic_sampling import REWARD_INFO as REWARD_INFO
from training.batch.dynamic_sampling import SUM_OF_REWARDS as SUM_OF_REWARDS
from training.batch.dynamic_sampling import collect_varied_groups as collect_varied_groups
from training.batch.dynamic_sampling import varied_groups as varied_groups
from training.batch.episode_rows import EpisodeRows as EpisodeRows
from training.batch.episode_rows import observation_mask as observation_mask
from training.batch.episode_rows import real_rows as real_rows
from training.batch.micro_batches import get_reverse_idx as get_reverse_idx
from training.batch.micro_batches import plan_padded as plan_padded
from training.batch.micro_batches import prepare_dynamic_batch as prepare_dynamic_batch
from training.batch.micro_batches import rearrange_micro_batches as rearrange_micro_batches
from training.batch.micro_batches import restore_dynamic_batch as restore_dynamic_batch
from training.batch.rank_layout import arrange as arrange
from training.batch.rank_layout import ceildiv as ceildiv
from training.batch.rank_layout import (
    get_seqlen_balanced_partitions as get_seqlen_balanced_partitions,
)
from training.batch.rank_layout import karmarkar_karp as karmarkar_karp
from training.batch.rank_layout import log_seqlen_unbalance as log_seqlen_unbalance
from training.batch.rank_layout import roundup_divisible as roundup_divisible
from training.batch.row_groups import rows_by_key as rows_by_key
from training.batch.row_groups import rows_of_parts as rows_of_parts
from training.batch.row_groups import shuffled_groups as shuffled_groups
