"""The size of an engine's KV cache, for the engine that sizes it itself and for the memory plan.

Invariant: nothing is loaded but the model's configuration.
"""

from transformers import PretrainedConfig

from training.config import RolloutConfig
from training.config.row_layout import names_a_state
from workers.model.builder import ModelSpec, torch_dtype
from workers.rollout.engine import PlannedMemory

# On a CPU, at most, unless the engine's own settings say otherwise.
CPU_KV_CACHE_BYTES = 1 << 30


def kv_cache_bytes(
    spec: ModelSpec, config: RolloutConfig, max_model_len: int, block: int = 128
) -> int:
    """Counts what `max_num_seqs` full sequences need, in blocks of so many tokens.

    At most CPU_KV_CACHE_BYTES, and at least one sequence and a spare block. Where layers keep a
    state, whose size a configuration says in a way of each family's, it is all of
    CPU_KV_CACHE_BYTES at least: memory that no sequence touches is not taken.
    """
    hf = spec.hf_config.get_text_config()
    # Layers may have heads of their own sizes.
    numbers_per_token = sum(_numbers_per_token(layer) for layer in hf.per_layer_config)
    block_bytes = numbers_per_token * torch_dtype(config.dtype).itemsize * block
    blocks_per_sequence = -(-max_model_len // block)
    wanted = config.max_num_seqs * blocks_per_sequence * block_bytes
    if config.name == "vllm" and names_a_state(hf.to_dict()):
        wanted = CPU_KV_CACHE_BYTES
    least = (blocks_per_sequence + 1) * block_bytes
    return max(min(wanted, CPU_KV_CACHE_BYTES), least)


def _numbers_per_token(layer: PretrainedConfig) -> int:
    """Counts the keys and values that a layer keeps of a token, by the layer's configuration."""
    settings = layer.to_dict()
    heads = settings.get("num_key_value_heads") or layer.num_attention_heads
    head_size = settings.get("head_dim") or layer.hidden_size // layer.num_attention_heads
    return 2 * heads * head_size


def plan_reserved_cache(
    spec: ModelSpec, rollout: RolloutConfig, *, weight_bytes: int, device_bytes: int | None
) -> PlannedMemory:
    """Plans an engine that takes its share of a CUDA device when it is built, and sleeps there.

    Weights and cache together are `gpu_memory_utilization` of the device. On a CPU (`device_bytes`
    None) it reserves a cache as `kv_cache_bytes` counts it, and cannot sleep.
    """
    if device_bytes is None:
        assert rollout.max_model_len is not None, "resolved_rollout fills it in"
        return PlannedMemory(kv_cache=kv_cache_bytes(spec, rollout, rollout.max_model_len))
    share = int(rollout.gpu_memory_utilization * device_bytes)
    return PlannedMemory(kv_cache=share - weight_bytes, sleeps=rollout.free_cache_engine)
