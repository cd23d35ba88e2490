"""Builds the transformers models that train: the policy, the reference and the value model.

Invariant: what trains has float32 master weights; the compute type (`model.dtype`) enters through
autocast (`ForwardSettings.autocast`), and what is frozen has weights of that type. Of several ranks
the first alone reads a model's weights; the others build it without memory (on the meta device)
until `shard_model` gives each its shards.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from data.plain_pickles import reading_plainly
from data.turn_tokens import pad_token_id
from training.config import CriticModelConfig, ModelConfig
from training.config.schema.reward import ScoringModelConfig
from workers.model.language_part import WHOLE, WholeModel, language_config
from workers.model.lora import add_adapters
from workers.model.plain_config import require_plain_config
from workers.model.training_pass import (
    checkpoint_gradients,
    learn_all_embeddings,
    set_training,
)
from workers.ranks.process_groups import rank, world_size

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Returns the type of a config's `dtype`."""
    return DTYPES[name]


def find_device(device: str | None) -> torch.device:
    """Returns the device that `trainer.device` names, or CUDA where there is one."""
    if not device:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return torch.device(device, torch.cuda.current_device())
    return torch.device(device)


@dataclass(frozen=True)
class ModelSpec:
    """Names a model folder or hub id, and reads from it what every worker derives from it."""

    config: ModelConfig | CriticModelConfig | ScoringModelConfig
    path: str
    device: torch.device

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Reads the folder's tokenizer."""
        return transformers.AutoTokenizer.from_pretrained(
            self.path, trust_remote_code=self.config.trust_remote_code
        )

    @cached_property
    def whole_config(self) -> transformers.PretrainedConfig:
        """Reads the folder's configuration, with `model.override_config` applied.

        Of a model that also sees or hears, settings of the language part go there.
        """
        config = transformers.AutoConfig.from_pretrained(
            self.path,
            trust_remote_code=self.config.trust_remote_code,
            **self.config.override_config,
        )
        require_plain_config(config, self.path, self.config.override_config)
        text_config = config.get_text_config()
        for name, value in self.config.override_config.items():
            if text_config is not config and hasattr(text_config, name):
                setattr(text_config, name, value)
        return config

    @cached_property
    def hf_config(self) -> transformers.PretrainedConfig:
        """Returns the configuration of what trains: the language part's, or the folder's own."""
        return language_config(self.whole_config)

    @cached_property
    def whole_model(self) -> WholeModel | None:
        """Returns the model of which the language part is trained; None: it is a language model."""
        if self.hf_config is self.whole_config:
            return None
        return WholeModel(self.whole_config, self.path)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Lists the tokens that end a turn: the tokenizer's, and the generation config's.

        Where that one names none, or there is none, they are config.json's, as transformers and
        engines take them; those of `model.override_config` go before either.
        """
        tokens = [self.tokenizer.eos_token_id]
        own = self.config.override_config.get("eos_token_id")
        tokens += _as_list(own) or self._generation_eos() or self._config_eos()
        return tuple(dict.fromkeys(token for token in tokens if token is not None))

    def _generation_eos(self) -> list[int]:
        """Lists the stop tokens of generation_config.json."""
        # A folder may have none.
        with suppress(OSError):
            return _as_list(transformers.GenerationConfig.from_pretrained(self.path).eos_token_id)
        return []

    def _config_eos(self) -> list[int]:
        """Lists the stop tokens that config.json itself names, not the defaults of its class."""
        content, _ = transformers.PretrainedConfig.get_config_dict(self.path)
        text_config = content.get("text_config") or {}
        return _as_list(content.get("eos_token_id")) or _as_list(text_config.get("eos_token_id"))

    @property
    def pad_token_id(self) -> int:
        """Returns the token that pads prompts and responses."""
        return pad_token_id(self.tokenizer)

    def causal_lm(self, *, trainable: bool) -> nn.Module:
        """Builds the policy (trainable) in float32, or a frozen reference in the compute type.

        With `lora_rank` it is the policy's adapters that train, in float32, and its weights are as
        the reference's.

        Raises:
            ValueError: the weights hold a head of their own, where the configuration says that the
                embedding is it.
        """
        lora_config: ModelConfig | None = None
        if trainable and isinstance(self.config, ModelConfig) and self.config.lora_rank:
            lora_config = self.config
        dtype = torch_dtype(self.config.dtype)
        if trainable and lora_config is None:
            dtype = torch.float32
        model, _ = self._read(transformers.AutoModelForCausalLM, dtype)
        self._check_tied_head(model)
        model = self._prepare(model, trainable)
        if lora_config is None:
            return model
        return add_adapters(model, lora_config, self.path)

    def value_model(self) -> nn.Module:
        """Builds a transformer with one output a token; a language model gets a new head of zeros.

        A zero head makes the first values 0, so a fresh critic does not add noise to the first
        advantages.

        Raises:
            ValueError: transformers has no token classifier for this model type.
        """
        model, missing = self._scalar_model(torch.float32)
        for name, parameter in model.named_parameters():
            if name in missing:
                nn.init.zeros_(parameter)
        return self._prepare(model, trainable=True)

    def reward_model(self) -> nn.Module:
        """Builds a frozen transformer with one output, from a sequence classification model.

        Raises:
            ValueError: it has no head that scores.
        """
        model, missing = self._scalar_model(torch_dtype(self.config.dtype))
        heads = [name for name in missing if name.endswith("weight")]
        if heads:
            raise ValueError(
                f"reward_model.model.path={self.path} has no {', '.join(heads)}: it scores nothing"
            )
        return self._prepare(model, trainable=False)

    def empty_causal_lm(self, dtype: torch.dtype) -> nn.Module:
        """Builds a policy without its weights, for an engine that is about to receive them."""
        return transformers.AutoModelForCausalLM.from_config(self.hf_config, dtype=dtype)

    def _scalar_model(self, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """Builds a transformer with one output a token; returns it as `_read` does."""
        auto_class = transformers.AutoModelForTokenClassification
        if self.whole_model is not None and type(self.hf_config) not in auto_class._model_mapping:
            raise ValueError(
                f"{self.path}: transformers has no model with one output a token for model type "
                f"'{self.hf_config.model_type}'; set critic.share_backbone=true, where the policy "
                "has the values, or critic.model.path of another model"
            )
        self.hf_config.num_labels = 1
        return self._read(auto_class, dtype)

    def _read(self, auto_class: Any, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """Builds a model, on the first rank with its weights; returns what the folder lacks, too.

        One whose memory is planned has none: its tensors are fake.
        """
        trust = self.config.trust_remote_code
        if rank() > 0 or detect_fake_mode():
            return self._empty(auto_class, dtype, "meta" if rank() else "cpu"), ()
        with reading_plainly(self.path):
            if self.whole_model is not None:
                model = self._empty(auto_class, dtype, "meta")
                self.whole_model.read(model, dtype, trust_remote_code=trust)
                return model, _make_head(model)
            model, info = auto_class.from_pretrained(
                self.path,
                config=self.hf_config,
                dtype=dtype,
                trust_remote_code=trust,
                output_loading_info=True,
            )
        return model, info["missing_keys"]

    def _empty(self, auto_class: Any, dtype: torch.dtype, device: str) -> nn.Module:
        """Builds a model without the folder's weights."""
        with torch.device(device):
            model: nn.Module = auto_class.from_config(
                config=self.hf_config, dtype=dtype, trust_remote_code=self.config.trust_remote_code
            )
        setattr(model, WHOLE, self.whole_model)
        return model

    def _check_tied_head(self, model: nn.Module) -> None:
        """Raises ValueError where the configuration ties the head, and the weights do not."""
        tied = self.hf_config.get_text_config().tie_word_embeddings
        if not tied:
            return
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            raise ValueError(
                f"{self.path}: tie_word_embeddings is true, but its weights hold another lm_head "
                "than the embedding, which an engine would not read; set "
                "actor_rollout_ref.model.override_config.tie_word_embeddings=false"
            )

    def _prepare(self, model: nn.Module, trainable: bool) -> nn.Module:
        """Sets gradients, compute type, checkpointing, device and mode of a model."""
        model.requires_grad_(trainable)
        learn_all_embeddings(model)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(_cast_output)
        if trainable and self._checkpoints_gradients():
            checkpoint_gradients(model)
        # On several ranks sharding moves each layer's part to the device; the whole might not
        # fit there.
        if world_size() == 1:
            model = model.to(self.device)
        set_training(model, trainable)
        return model

    def _checkpoints_gradients(self) -> bool:
        if isinstance(self.config, ScoringModelConfig):
            return False
        return self.config.enable_gradient_checkpointing


def _make_head(model: nn.Module) -> list[str]:
    """Gives memory to a head that no folder has weights for; returns the names of its tensors."""
    names = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    for name in names:
        model.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu", recurse=False)
    return names


def _as_list(tokens: int | list[int] | None) -> list[int]:
    """Makes a list of what a config names: one token, several or none."""
    if tokens is None:
        return []
    return tokens if isinstance(tokens, list) else [tokens]


def _cast_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Casts the output of a module that has weights to autocast's type, where autocast is on.

    By itself autocast casts matrix products alone: embeddings and norms, and with them the residual
    stream, would be float32 on one rank, while they are of the compute type on several, where FSDP2
    casts the weights.
    """
    if not isinstance(output, Tensor) or not torch.is_autocast_enabled(output.device.type):
        return output
    return output.to(torch.get_autocast_dtype(output.device.type))


def require_same_vocabulary(
    policy: ModelSpec, teacher: ModelSpec, key: str = "actor_rollout_ref.ref.model.path"
) -> None:
    """Raises ValueError, with the teacher's key, unless token ids mean the same to both models."""
    if policy.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(
            f"{key}={teacher.path} has another vocabulary than {policy.path}; a teacher must "
            "read the policy's tokens: take one of the same family"
        )
