"""SHIM: the names of this module stand in the files that they are imported from."""

from workers.ranks.memory import expandable_segments as expandable_segments
from workers.ranks.memory import keep_heap as settle_heap  # noqa: F401
from workers.ranks.memory import limit_caches as limit_caches
from workers.ranks.offload import offload as offload
from workers.ranks.offload import on_device as on_device
from workers.ranks.process_groups import from_leader as from_leader
from workers.ranks.process_groups import is_leader as is_leader
from workers.ranks.process_groups import max_over_ranks as max_over_ranks
from workers.ranks.process_groups import open_store as open_store
from workers.ranks.process_groups import rank as rank
from workers.ranks.process_groups import rank_group as rank_group
from workers.ranks.process_groups import start_process_group as start_process_group
from workers.ranks.process_groups import sum_of_parts as sum_of_parts
from workers.ranks.process_groups import sum_over_ranks as sum_over_ranks
from workers.ranks.process_groups import world_size as world_size
from workers.ranks.sharding import full_tensor as full_tensor
from workers.ranks.sharding import shard_model as shard_model
from workers.ranks.worker_process import start_worker as start_worker
from workers.ranks.worker_process import strictly_deterministic as strictly_deterministic
from workers.weight_sync.channel import CHANNEL_TIMEOUT as CHANNEL_TIMEOUT
from workers.weight_sync.channel import WeightChannel as WeightChannel
