"""SHIM: array_ops, seeds, outcome_rewards, tensor_bytes."""

from data.array_ops import Keys as Keys
from data.array_ops import RowIndex as RowIndex
from data.array_ops import merge_meta_info as merge_meta_info
from data.array_ops import object_array as object_array
from data.array_ops import pick as pick
from data.array_ops import row_blocks as row_blocks
from data.array_ops import row_sums as row_sums
from data.array_ops import same as same
from data.array_ops import union_dicts as union_dicts
from data.outcome_rewards import move_to_sampled_tokens as move_to_sampled_tokens
from data.outcome_rewards import place_outcome_rewards as place_outcome_rewards
from data.seeds import sample_ids as sample_ids
from data.seeds import seed_for as seed_for
from data.seeds import step_info as step_info
from data.tensor_bytes import from_bytes as from_bytes
from data.tensor_bytes import to_bytes as to_bytes
