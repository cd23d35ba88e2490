"""The SGLang rollout engine: one that this process starts, or a server that is asked over HTTP.

It rests on these facts of SGLang 0.5: log-probs are of the distribution after temperature, but
before top-k and top-p; `ignore_eos` switches `stop_token_ids` off as well; a request's seed counts
only with `enable_deterministic_inference`; tensors are taken in parts, under the names of the
checkpoint; memory that was not released cannot be resumed; and its synchronous calls run the
engine's event loop themselves, so that `step` runs it too and no thread does.

Invariant: a request that was sent is not sent again, since a server that was started anew has other
weights.
"""

import asyncio
import base64
import importlib.util
import json
import logging
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import torch.distributed as dist
from torch import Tensor

from training.config import PPOConfig, RolloutConfig
from workers.model.builder import ModelSpec
from workers.ranks.process_groups import rank, world_size
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import (
    Completion,
    NamedTensors,
    Part,
    PlannedMemory,
    Sampling,
    read_finish_reason,
)
from workers.rollout.kv_cache import plan_reserved_cache
from workers.weight_sync.manifest import Manifest, as_announced, check_manifest, weight_manifest
from workers.weight_sync.saved_form import SavedForm

logger = logging.getLogger(__name__)
# About so many bytes of tensors are sent together.
BUCKET_BYTES = 256 << 20
# `step` waits so many seconds for a request to finish.
STEP_S = 0.02
# Requests may take so many seconds to be gone before cached prefixes are dropped.
FLUSH_S = 30.0
# To reach a server.
CONNECT_S = 10.0
Bucket = list[tuple[str, Tensor]]


class LocalEngine:
    """Starts an engine of this process's own, whose processes run on its GPUs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from sglang import Engine

        self.engine = Engine(**settings)
        self.loop = self.engine.loop
        self.generate = self.engine.async_generate

    def call(self, verb: str, **arguments: Any) -> Any:
        """Calls a method of the engine."""
        # The one verb that the engine itself does not have.
        owner = self.engine.tokenizer_manager if verb == "abort_request" else self.engine
        return getattr(owner, verb)(**arguments)

    def flush(self) -> bool:
        """Drops cached prefixes; returns whether that was possible: it is where nothing runs."""
        return self.call("flush_cache").success

    def send(self, bucket: Bucket) -> None:
        """Replaces weights; on a GPU the engine's processes read them where they are."""
        accepted, message = self.call(
            "update_weights_from_tensor", named_tensors=bucket, flush_cache=False
        )
        if not accepted:
            raise ValueError(f"SGLang did not take the weights: {message}")


class Server:
    """Asks a server (`python -m sglang.launch_server`) on this machine or another.

    Weights go by value: no sglang is needed here, and no GPU that both see.
    """

    def __init__(self, base_url: str, tp_size: int = 1) -> None:
        self.url = base_url
        self.tp_size = tp_size
        self.loop = asyncio.new_event_loop()
        # Errors are those of requests, which `step` raises.
        self.loop.set_exception_handler(ignore_exception)
        self.http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def _post(self, verb: str, **body: Any) -> httpx.Response:
        try:
            return await self.http.post(f"/{verb}", json=body)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise RuntimeError(
                f"the SGLang server {self.url} does not answer to {verb}: {error!r}. "
                "Start it (python -m sglang.launch_server --model-path MODEL --port 30000), or "
                "name another in actor_rollout_ref.rollout.engine_kwargs.sglang.base_url; "
                "what it was asked is not asked again, as a server that starts anew has other "
                "weights"
            ) from error

    async def generate(self, **request: Any) -> dict[str, Any]:
        """Asks for the answer to one request."""
        reply = await self._post("generate", **request)
        return self._checked(reply).json()

    def call(self, verb: str, **arguments: Any) -> None:
        """Calls a verb and waits until it is done."""
        self._checked(self.loop.run_until_complete(self._post(verb, **arguments)))

    def flush(self) -> bool:
        """Drops cached prefixes; returns whether that was possible: it is where nothing runs."""
        return self.loop.run_until_complete(self._post("flush_cache")).is_success

    def send(self, bucket: Bucket) -> None:
        """Replaces weights."""
        # A part of a tensor would take all of it along.
        values = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in bucket])
        packed = base64.b64encode(values).decode()
        self.call(
            "update_weights_from_tensor",
            serialized_named_tensors=[packed] * self.tp_size,
            flush_cache=False,
        )

    def _checked(self, reply: httpx.Response) -> httpx.Response:
        """Raises ValueError where the server refuses a request, RuntimeError where it fails."""
        if reply.is_error:
            kind = ValueError if reply.is_client_error else RuntimeError
            raise kind(f"{reply.url} answers {reply.status_code}: {reply.text[:500]}")
        return reply


def ignore_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles what an event loop would otherwise print."""


@dataclass(frozen=True)
class SentRequest:
    """Holds what `step` must know of a running request.

    Attributes:
        request_id: ours; rid: SGLang's.
        max_tokens: what it asked for.
    """

    request_id: str
    rid: str
    max_tokens: int


class SGLangRollout(BaseRollout):
    """Generates with SGLang.

    `rollout.engine_kwargs.sglang` is passed on and wins over what is derived here. With `base_url`
    in it, a server's address, that server is asked; `tp_size` then says what it was started with.
    It serves all ranks, of which the first sends it the weights and puts it to sleep.
    """

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.saved = SavedForm(model_config.whole_config)
        self.running: dict[asyncio.Task[dict[str, Any]], SentRequest] = {}
        self.asleep: set[Part] = set()
        passed_on = config.engine_kwargs.get("sglang", {})
        self.shared = "base_url" in passed_on
        # A server has what it was started with, or was sent last.
        self.reads_folder = not self.shared
        self.client: Server | LocalEngine
        if self.shared:
            self.client = Server(**passed_on)
        else:
            self.client = LocalEngine(self.engine_args(model_config) | passed_on)
        self.leads = not self.shared or rank() == 0
        self.begin()

    # Its demands on a config.

    @classmethod
    def check_config(cls, config: PPOConfig) -> Iterator[str]:
        """Yields the problems of a config with SGLang."""
        yield from super().check_config(config)
        passed_on = config.actor_rollout_ref.rollout.engine_kwargs.get("sglang", {})
        is_installed = importlib.util.find_spec("sglang") is not None
        if not passed_on.get("base_url") and not is_installed:
            yield (
                "actor_rollout_ref.rollout.name=sglang: SGLang is not installed; "
                '`pip install "sglang[all]"` on a machine with a GPU, or '
                "name a server that runs: "
                "actor_rollout_ref.rollout.engine_kwargs.sglang.base_url=http://HOST:30000"
            )

    @classmethod
    def plan_memory(
        cls,
        spec: ModelSpec,
        rollout: RolloutConfig,
        *,
        weight_bytes: int,
        device_bytes: int | None,
    ) -> PlannedMemory:
        """Plans the part of the device that SGLang takes when it is built."""
        return plan_reserved_cache(
            spec, rollout, weight_bytes=weight_bytes, device_bytes=device_bytes
        )

    def engine_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives SGLang's settings from the config's."""
        cfg = self.config
        return {
            "model_path": spec.path,
            "trust_remote_code": spec.config.trust_remote_code,
            "json_model_override_args": json.dumps(dict(spec.config.override_config)),
            "dtype": cfg.dtype,
            # Ids go in and come out.
            "skip_tokenizer_init": True,
            "context_length": self.max_model_len,
            "max_running_requests": cfg.max_num_seqs,
            "mem_fraction_static": cfg.gpu_memory_utilization,
            "enable_memory_saver": cfg.free_cache_engine,
            "disable_cuda_graph": cfg.enforce_eager,
            "disable_radix_cache": not cfg.enable_prefix_caching,
            # -1: prompts are not cut.
            "chunked_prefill_size": (
                cfg.max_num_batched_tokens if cfg.enable_chunked_prefill else -1
            ),
        }

    # Requests.

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        stop_token_ids = list(sampling.stop_token_ids)
        params = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_tokens,
            "sampling_seed": sampling.seed,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": not stop_token_ids,
        }
        rid = uuid4().hex
        answer = self.client.generate(
            input_ids=prompt_ids, sampling_params=params, return_logprob=True, rid=rid
        )
        task = self.client.loop.create_task(answer)
        self.running[task] = SentRequest(request_id, rid, sampling.max_tokens)

    def step(self) -> list[Completion]:
        """Waits a moment for a request to finish; returns all that have."""
        if not self.running:
            return []
        first = asyncio.wait(self.running, timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.client.loop.run_until_complete(first)
        return [self._completion(task) for task in done]

    def _completion(self, task: asyncio.Task[dict[str, Any]]) -> Completion:
        request = self.running.pop(task)
        try:
            meta = task.result()["meta_info"]
        except ValueError as error:
            logger.warning("SGLang refuses a request: %s", error)
            meta = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}
        # Each sampled token has (log-prob, id, text).
        entries = meta["output_token_logprobs"]
        reported = meta["finish_reason"]["type"]
        return Completion(
            request_id=request.request_id,
            token_ids=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            finish_reason=read_finish_reason(reported, len(entries), request.max_tokens),
        )

    def abort(self, request_id: str) -> None:
        """Tells the server to end the request; what it then answers nobody reads."""
        for request in self.running.values():
            if request.request_id == request_id:
                self.client.call("abort_request", rid=request.rid)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences as prompts, behind which a token is sampled that nobody reads."""
        scores = []
        for ids in sequences:
            answer = self.client.loop.run_until_complete(
                self.client.generate(
                    input_ids=ids,
                    return_logprob=True,
                    logprob_start_len=0,
                    sampling_params={"max_new_tokens": 1},
                )
            )
            entries = answer["meta_info"]["input_token_logprobs"]
            scores.append([entry[0] for entry in entries[1:]])
        return scores

    def begin(self) -> None:
        """Drops cached prefixes, and requests that a batch before left behind.

        Raises:
            RuntimeError: the requests of others go on in the server.
        """
        for request in self.running.values():
            self.client.call("abort_request", rid=request.rid)
        while self.running:
            self.step()
        deadline = time.monotonic() + FLUSH_S
        while self.leads and not self.client.flush():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "SGLang keeps cached prefixes while requests run, which are not this run's"
                )
            time.sleep(STEP_S)
        self._await_leader()

    # Weights and memory.

    def update_weights(self, weights: NamedTensors, manifest: Manifest) -> None:
        """Replaces all weights, a bucket at a time, and drops what was cached with the old ones."""
        check_manifest(manifest, weight_manifest(self.saved.model))
        for bucket in buckets(self.saved.of(as_announced(weights, manifest))):
            if self.leads:
                self.client.send(bucket)
        self.begin()

    def sleep(self) -> None:
        """Gives the GPU memory of cache and weights back, which are not kept."""
        if self.config.free_cache_engine and not self.asleep:
            self.begin()
            self._move("release_memory_occupation", {"kv_cache", "weights"})
            self.asleep = {"kv_cache", "weights"}

    def wake_up(self, part: Part | None = None) -> None:
        """Takes the memory back, of what sleeps."""
        wanted = self.asleep if part is None else {part}
        parts = self.asleep & wanted
        if parts:
            self._move("resume_memory_occupation", parts)
            self.asleep -= parts

    def _move(self, verb: str, parts: set[Part]) -> None:
        if self.leads:
            self.client.call(verb, tags=sorted(parts))
        self._await_leader()

    def _await_leader(self) -> None:
        if self.shared and world_size() > 1:
            dist.barrier()


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Cuts a stream of tensors behind every BUCKET_BYTES or so; a tensor stays whole."""
    bucket: Bucket = []
    num_bytes = 0
    bucket_number = 0
    for name, tensor in weights:
        num_bytes += tensor.nbytes
        if num_bytes // BUCKET_BYTES != bucket_number and bucket:
            yield bucket
            bucket = []
        bucket_number = num_bytes // BUCKET_BYTES
        bucket.append((name, tensor))
    if bucket:
        yield bucket
