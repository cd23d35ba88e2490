"""The zoo's families: each a configuration of its own architecture, made tiny and random.

A family is what one file of transformers computes; a checkpoint is named nowhere. Weights are drawn
so that a fault shows: matrices far from zero, norms away from one, routers that choose.
Invariant: the same name and seed give the same bytes, without a network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.zoo.chat_forms import VOCABULARY, make_tokenizer

SEED = 1
# Standard deviations of drawn matrices, and of what is added to vectors.
MATRIX = 0.1
VECTOR = 0.05
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
WITH_HEAD_DIM = COMMON | {"head_dim": 32}
# Narrow enough that a row of the proofs is longer.
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
# What vLLM reads of the first checkpoints' files.
CHOICE_OF_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# As gpt-oss has it, whose attention is scaled by the factor alone.
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Sizes of DeepSeek's attention and of delta nets that vLLM's kernels for a CPU know.
LATENT_OF_VLLM = {
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
DELTA_NET_OF_VLLM = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Rows may be longer than a block of vLLM's cache.
LENGTH_OF_VLLM = {"max_position_embeddings": 4096}
# Heads of Mamba 2, by the names of Granite, Bamba and Falcon H1.
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a family.

    Attributes:
        config_class: transformers' class of its configuration.
        chat: the form of its conversations, in chat_forms.py.
        keeps_state: a layer keeps a state beside keys and values (linear attention, Mamba,
            convolutions), so that its rows must be padded or cut where its kernels are told to.
        auto_class: transformers' class that builds a model of a configuration.
    """

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    name: str
    config_class: str
    chat: str
    settings: dict[str, Any] = field(default_factory=dict)
    keeps_state: bool = False

    def config(self) -> PretrainedConfig:
        """Makes the configuration, with the ids of its tokenizer."""
        tokenizer = make_tokenizer(self.chat)
        ids = {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        return getattr(transformers, self.config_class)(**(self.settings | ids))

    def for_vllm(self) -> Family:
        """Returns the family in sizes that vLLM's kernels for a CPU know."""
        settings = self.settings | LENGTH_OF_VLLM
        if "kv_lora_rank" in settings:
            settings |= LATENT_OF_VLLM
        elif "head_dim" not in settings:
            heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
            settings |= {"num_attention_heads": 2, "num_key_value_heads": 2 * groups // heads}
        if "linear_key_head_dim" in settings:
            settings |= DELTA_NET_OF_VLLM
        return replace(self, settings=settings)

    def make(self, folder: Path, seed: int = SEED) -> Path:
        """Writes model and tokenizer to a folder, and returns it."""
        model = self.build(self.config(), seed)
        return self.write(folder, model, make_tokenizer(self.chat), seed)

    def build(self, config: PretrainedConfig, seed: int = SEED) -> PreTrainedModel:
        """Builds a model with drawn weights, in float32."""
        torch.manual_seed(seed)
        model = self.auto_class.from_config(config, dtype=torch.float32)
        draw_weights(model, seed)
        model.generation_config.do_sample = False
        return model

    def write(
        self,
        folder: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        seed: int = SEED,
    ) -> Path:
        """Writes a model of this family and a tokenizer to a folder, and returns it."""
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


@dataclass(frozen=True, kw_only=True)
class WholeFamily(Family):
    """Describes a family that also sees, whose language part is another family's model.

    Attributes:
        part: that family.
        tower: settings of what sees.
        placeholders: token ids by their names in the configuration.
        further: shapes of tensors that its files have, and transformers reads into no model.
    """

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    part: Family
    tower: dict[str, Any]
    placeholders: dict[str, int]
    further: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def for_vllm(self) -> WholeFamily:
        """Returns the family with a language part in sizes that vLLM's kernels for a CPU know."""
        return replace(self, part=self.part.for_vllm())

    def config(self) -> PretrainedConfig:
        """Makes the configuration of the whole, with the part's in it."""
        return getattr(transformers, self.config_class)(
            text_config=self.part.config().to_dict(),
            vision_config=self.tower,
            tie_word_embeddings=self.part.settings["tie_word_embeddings"],
            **self.settings | self.placeholders,
        )

    def write(
        self,
        folder: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        seed: int = SEED,
    ) -> Path:
        """Writes a model of this family and a tokenizer to a folder, and returns it."""
        super().write(folder, model, tokenizer, seed)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in self.further.items():
            tensors[name] = torch.randn(shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draws matrices anew, and moves every vector and every bias of a router that is a buffer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1 and "conv" not in name:
                tensor.copy_(MATRIX * noise)
            else:
                tensor.add_(VECTOR * noise)
        for name, tensor in model.named_buffers():
            if "correction_bias" in name:
                tensor.copy_(VECTOR * torch.randn(tensor.shape, generator=generator))


def _family(
    name: str, config_class: str, chat: str, *, keeps_state: bool = False, **settings: Any
) -> Family:
    return Family(
        name=name,
        config_class=config_class,
        chat=chat,
        settings=settings,
        keeps_state=keeps_state,
    )


def _hybrid(name: str, config_class: str, chat: str, **settings: Any) -> Family:
    return _family(name, config_class, chat, keeps_state=True, **settings)


_ALL = [
    # Attention over the full context.
    _family("qwen3", "Qwen3Config", "chatml", **WITH_HEAD_DIM | {"tie_word_embeddings": True}),
    _family(
        "llama3",
        "LlamaConfig",
        "llama3",
        **COMMON | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    _family("mistral", "MistralConfig", "mistral", **WITH_HEAD_DIM | {"sliding_window": None}),
    _family(
        "ministral3",
        "Ministral3Config",
        "mistral",
        **WITH_HEAD_DIM
        | {"sliding_window": None, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    _family("glm4", "Glm4Config", "glm", **WITH_HEAD_DIM),
    _family("phi4", "Phi3Config", "phi", **COMMON),
    _family("ernie4_5", "Ernie4_5Config", "ernie", **WITH_HEAD_DIM),
    _family("olmo2", "Olmo2Config", "chatml", **COMMON),
    _family("smollm3", "SmolLM3Config", "chatml", **COMMON | {"num_hidden_layers": 4}),
    _family("hunyuan", "HunYuanDenseV1Config", "hunyuan", **WITH_HEAD_DIM),
    _family("seed_oss", "SeedOssConfig", "seed", **WITH_HEAD_DIM),
    _family("granite3", "GraniteConfig", "granite", **COMMON | {"logits_scaling": 8.0}),
    _family("apertus", "ApertusConfig", "chatml", **COMMON | {"rope_parameters": LLAMA3_ROPE}),
    # Windows, caps and sinks.
    _family(
        "gemma3",
        "Gemma3TextConfig",
        "gemma",
        **WITH_HEAD_DIM | WINDOW | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    _family(
        "gemma4",
        "Gemma4TextConfig",
        "gemma",
        **WITH_HEAD_DIM
        | WINDOW
        | {
            "global_head_dim": 64,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "tie_word_embeddings": True,
        },
    ),
    _family("olmo3", "Olmo3Config", "chatml", **COMMON | WINDOW),
    _family("exaone4", "Exaone4Config", "chatml", **COMMON | WINDOW),
    _family(
        "cohere2", "Cohere2Config", "chatml", **COMMON | WINDOW | {"tie_word_embeddings": True}
    ),
    _family(
        "gpt_oss",
        "GptOssConfig",
        "harmony",
        **WITH_HEAD_DIM
        | WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": YARN_OF_GPT_OSS,
        },
    ),
    # Experts.
    _family("qwen3_moe", "Qwen3MoeConfig", "chatml", **WITH_HEAD_DIM | EXPERTS),
    _family(
        "glm4_moe",
        "Glm4MoeConfig",
        "glm",
        **WITH_HEAD_DIM | ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    _family("glm4_moe_lite", "Glm4MoeLiteConfig", "glm", **COMMON | ROUTED | LATENT),
    _family(
        "deepseek_v3",
        "DeepseekV3Config",
        "deepseek",
        **COMMON
        | ROUTED
        | LATENT
        | CHOICE_OF_DEEPSEEK
        | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    ),
    _family(
        "kimi_k2",
        "DeepseekV3Config",
        "kimi",
        **COMMON
        | ROUTED
        | LATENT
        | CHOICE_OF_DEEPSEEK
        | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    _family(
        "minimax_m2",
        "MiniMaxM2Config",
        "minimax",
        **WITH_HEAD_DIM
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
        # vLLM reads what the first checkpoints' files say beside.
        | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
        | {"use_qk_norm": True}
        | {"rope_parameters": HALF_ROTARY},
    ),
    _family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "ernie",
        **COMMON
        | {
            "moe_intermediate_size": 32,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    # Layers that keep a state.
    _hybrid("qwen3_5", "Qwen3_5TextConfig", "chatml", **WITH_HEAD_DIM | DELTA_NET),
    _hybrid(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "chatml",
        **WITH_HEAD_DIM | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    _hybrid(
        "qwen3_next",
        "Qwen3NextConfig",
        "chatml",
        **WITH_HEAD_DIM | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    _hybrid(
        "granite4",
        "GraniteMoeHybridConfig",
        "granite",
        **COMMON
        | MAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
    _hybrid(
        "falcon_h1", "FalconH1Config", "chatml", **WITH_HEAD_DIM | MAMBA | {"mamba_d_ssm": 128}
    ),
    _hybrid(
        "nemotron_h",
        "NemotronHConfig",
        "chatml",
        **WITH_HEAD_DIM
        | ROUTED
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    _hybrid(
        "lfm2",
        "Lfm2Config",
        "chatml",
        **COMMON
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "conv_L_cache": 3,
            # vLLM reads sizes of the first checkpoints' files.
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    _hybrid(
        "bamba",
        "BambaConfig",
        "chatml",
        **COMMON | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    _hybrid(
        "jamba",
        "JambaConfig",
        "chatml",
        **COMMON
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    _hybrid("olmo_hybrid", "OlmoHybridConfig", "chatml", **COMMON | DELTA_NET),
    _hybrid(
        "kimi_linear",
        "KimiLinearConfig",
        "kimi",
        **COMMON
        | {
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "layer_types": DELTA_NET["layer_types"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "num_local_experts": 4,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    _hybrid(
        "zamba2",
        "Zamba2Config",
        "chatml",
        **COMMON
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 8,
        },
    ),
]

_PARTS = {family.name: family for family in _ALL}
_SEES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def _whole(name: str, config_class: str, **described: Any) -> WholeFamily:
    part = _PARTS[name]
    return WholeFamily(
        name=f"{name}_vision",
        config_class=config_class,
        chat=part.chat,
        keeps_state=part.keeps_state,
        part=part,
        **described,
    )


# The last ids of the vocabulary, which no conversation has, stand for pictures and sounds.
_WHOLE = [
    _whole(
        "qwen3_5",
        "Qwen3_5Config",
        tower={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        placeholders={
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
        },
        # Of the head that predicts several tokens.
        further={"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)},
    ),
    _whole(
        "gemma3",
        "Gemma3Config",
        tower=_SEES | {"image_size": 16},
        placeholders={"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
        settings={"mm_tokens_per_image": 4},
    ),
    _whole(
        "gemma4",
        "Gemma4Config",
        tower=_SEES | {"num_key_value_heads": 2, "head_dim": 16},
        placeholders={
            "image_token_id": 90,
            "video_token_id": 91,
            "boi_token_id": 92,
            "eoi_token_id": 93,
            "audio_token_id": 94,
        },
        settings={"audio_config": None},
    ),
]

FAMILIES: dict[str, Family] = {family.name: family for family in [*_ALL, *_WHOLE]}
# Those that also see.
WHOLE: dict[str, WholeFamily] = {family.name: family for family in _WHOLE}
# What every run of the tests plays: one of each kind of layer.
FAST = ("qwen3", "gemma3", "qwen3_moe", "qwen3_5")
# What the trial at the start refuses for rollout.name=hf; the reason is the trial's own sentence.
REFUSED: dict[str, Family] = {
    family.name: family
    for family in [
        # A sparse indexer: behind `index_topk` tokens it may take keys that are masked.
        _family(
            "deepseek_v32",
            "DeepseekV32Config",
            "deepseek",
            **COMMON
            | ROUTED
            | LATENT
            | {"n_group": 1, "topk_group": 1}
            | {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 2},
        ),
        # Its code keeps its states in its modules.
        _hybrid(
            "recurrent_gemma",
            "RecurrentGemmaConfig",
            "gemma",
            **COMMON
            | {"num_hidden_layers": 3, "num_key_value_heads": 1}
            | {"attention_window_size": 8, "lru_width": 64},
        ),
        # Its cache cannot take rows out.
        _hybrid(
            "minimax_01",
            "MiniMaxConfig",
            "minimax",
            **WITH_HEAD_DIM
            | {"num_local_experts": 4, "num_experts_per_tok": 2}
            | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
        ),
    ]
}
