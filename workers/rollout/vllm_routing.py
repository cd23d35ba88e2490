"""How vLLM tells which experts it chose: by itself on CUDA, and by its routers' calls on a CPU.

On CUDA `enable_return_routed_experts` adds to a finished request (tokens, all decoder layers, k),
prompt included, also where the prompt was found in the cache. That needs the second of vLLM's model
runners and its cache of prefixes; a CPU has the first one, which knows nothing of it. There the
choices are kept here, by the place in the cache where a token's keys lie: who finds another's
prefix in the cache finds its choices as well.

Invariant: what is read of a request are the choices with which its keys in the cache were computed.
A CPU's requests that go on with new weights are computed anew, and so are their choices.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.model.router_replay import Routers


def native_args(prefix_caching: bool) -> dict[str, Any]:
    """Returns the settings by which vLLM on CUDA returns its choices.

    Raises:
        ValueError: prefixes are not cached, without which it does not.
    """
    if not prefix_caching:
        raise ValueError(
            "actor_rollout_ref.actor.router_replay.mode=R3: vLLM tells its experts only where it "
            "caches prefixes, and for this model or by enable_prefix_caching=false it does not; "
            "set mode=disabled"
        )
    return {"enable_return_routed_experts": True}


def of_layers_with_experts(told: np.ndarray, routers: Routers) -> np.ndarray:
    """Takes the layers that have experts out of what vLLM tells of all: (tokens, layers, k)."""
    dtype = routers.absent(0).numpy().dtype
    return told[:, list(routers.layers)].astype(dtype)


class SlotChoices:
    """Keeps the choices of an engine on a CPU, by the places of its cache.

    Args:
        engine: vLLM's LLMEngine, in this process.

    Raises:
        ValueError: no layer keeps the keys of all tokens, or a layer's router is of another kind.
    """

    def __init__(self, engine: Any, routers: Routers) -> None:
        [runner] = engine.collective_rpc(lambda worker: worker.worker.model_runner)
        self.runner = runner
        self.routers = routers
        self.group = full_attention_group(runner.kv_cache_config)
        described = runner.kv_cache_config.kv_cache_groups[self.group]
        # All layers of the group have one place for a token.
        self.attention_layer = described.layer_names[0]
        self.table = runner.input_batch.block_table[self.group]
        places = runner.kv_cache_config.num_blocks * described.kv_cache_spec.block_size
        self.by_place = routers.absent(places)
        engine.apply_model(self._listen)

    def _listen(self, model: nn.Module) -> None:
        """Has each layer's router tell what it chose."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        heard = []
        for module in model.modules():
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter):
                layer = self.routers.layers.index(module.layer_id)
                module.router.set_capture_fn(partial(self._keep, layer))
                heard.append(module.layer_id)
        if sorted(heard) != sorted(self.routers.layers):
            raise ValueError(
                "actor_rollout_ref.actor.router_replay.mode=R3: vLLM tells the experts of layers "
                f"{sorted(heard)} of this model, which has some in {list(self.routers.layers)}; "
                "set mode=disabled, or take rollout.name=hf"
            )

    def _keep(self, layer: int, chosen: Tensor) -> None:
        """Keeps what a layer chose for the tokens of a step, (tokens, k)."""
        from vllm.forward_context import get_forward_context

        places = get_forward_context().slot_mapping.get(self.attention_layer)
        # A pass that sizes the engine's memory has no cache.
        if places is None:
            return
        places = places[: len(chosen)]
        real = places >= 0
        self.by_place[places[real], layer] = chosen[: len(places)][real].to(self.by_place.dtype)

    def read(self, request_id: str, tokens: int) -> np.ndarray | None:
        """Returns the choices of a request's first tokens: (tokens, layers, k).

        It may be asked until the engine's next step, which gives the places to others.
        """
        for internal_id, row in self.runner.input_batch.req_id_to_index.items():
            # vLLM adds characters of its own to a request's name.
            if internal_id.rpartition("-")[0] == request_id:
                size = self.table.block_size
                blocks = self.table.block_table.np[row, : -(-tokens // size)]  # (blocks,)
                places = (blocks[:, None] * size + np.arange(size)).flatten()[:tokens]
                return self.by_place[torch.from_numpy(places)].numpy()
        return None


def full_attention_group(config: Any) -> int:
    """Returns the number of the cache's group that keeps a place for every token."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number
    raise ValueError(
        "actor_rollout_ref.actor.router_replay.mode=R3: no layer of this model keeps the keys of "
        "all tokens, by which vLLM's choices are kept on a CPU; take rollout.name=hf, or set "
        "mode=disabled"
    )
