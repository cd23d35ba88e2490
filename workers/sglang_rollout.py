"""The SGLang rollout engine: one that this process starts (`sglang.Engine`), or a server that is asked over HTTP.

It rests on these facts of SGLang 0.5: log-probs are of the distribution after temperature, but before top-k and top-p;
`ignore_eos` switches `stop_token_ids` off as well; a request's seed counts only with `enable_deterministic_inference`;
tensors are taken in parts, under the names of the checkpoint; memory that was not released cannot be resumed; and its
synchronous calls run the engine's event loop themselves, so that `step` runs it too and no thread does. Invariant: a
request that was sent is not sent again, since a server that was started anew has other weights.
"""

import asyncio
import base64
import json
import logging
import pickle
import time
from itertools import accumulate, groupby, tee
from typing import Any
from uuid import uuid4

import httpx
import torch.distributed as dist

from data.texts import say
from training.config import RolloutConfig
from workers.model.builder import ModelSpec
from workers.ranks.distributed import rank, world_size
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, NamedTensors, Part, Sampling, finish_reason
from workers.rollout.weight_sync import (
    Manifest,
    SavedForm,
    as_announced,
    check_manifest,
    weight_manifest,
)

logger = logging.getLogger(__name__)
# About so many bytes of tensors are sent together.
BUCKET_BYTES = 256 << 20
# `step` waits so many seconds for a request to finish; and requests to be gone before cached prefixes are dropped.
STEP_S = 0.02
FLUSH_S = 30.0
Bucket = list[tuple[str, Any]]


class LocalEngine:
    """Is an engine of this process's own, whose processes run on its GPUs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from sglang import Engine

        self.engine = Engine(**settings)
        self.loop, self.generate = self.engine.loop, self.engine.async_generate

    def call(self, verb: str, **given: Any) -> Any:
        """Calls a method of the engine."""
        return getattr(
            self.engine.tokenizer_manager if verb == "abort_request" else self.engine, verb
        )(**given)

    def flush(self) -> bool:
        """Drops cached prefixes; says whether that was possible, which it is where nothing runs."""
        return self.call("flush_cache").success

    def send(self, bucket: Bucket) -> None:
        """Replaces weights; on a GPU the engine's processes read them where they are."""
        taken, message = self.call(
            "update_weights_from_tensor", named_tensors=bucket, flush_cache=False
        )
        if not taken:
            raise ValueError(f"SGLang did not take the weights: {message}")


class Server:
    """Asks a server (`python -m sglang.launch_server`) on this machine or another.

    Weights go by value: no sglang is needed here, and no GPU that both see.
    """

    def __init__(self, base_url: str, tp_size: int = 1) -> None:
        self.url, self.tp_size, self.loop = base_url, tp_size, asyncio.new_event_loop()
        # Errors are those of requests, which `step` raises.
        self.loop.set_exception_handler(lambda loop, context: None)
        wait, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=base_url, timeout=wait, limits=limits, trust_env=False
        )

    async def _post(self, verb: str, **body: Any) -> httpx.Response:
        try:
            return await self.http.post(f"/{verb}", json=body)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise RuntimeError(
                say("sglang_away", url=self.url, verb=verb, error=repr(error))
            ) from error

    async def generate(self, **request: Any) -> dict[str, Any]:
        """Has one request answered."""
        return self._checked(await self._post("generate", **request)).json()

    def call(self, verb: str, **given: Any) -> None:
        """Calls a verb and waits until it is done."""
        self._checked(self.loop.run_until_complete(self._post(verb, **given)))

    def flush(self) -> bool:
        """Drops cached prefixes; says whether that was possible, which it is where nothing runs."""
        return self.loop.run_until_complete(self._post("flush_cache")).is_success

    def send(self, bucket: Bucket) -> None:
        """Replaces weights."""
        # A part of a tensor would take all of it along.
        values = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in bucket])
        packed = [base64.b64encode(values).decode()] * self.tp_size
        self.call("update_weights_from_tensor", serialized_named_tensors=packed, flush_cache=False)

    def _checked(self, reply: httpx.Response) -> httpx.Response:
        if reply.is_error:
            kind = ValueError if reply.is_client_error else RuntimeError
            raise kind(f"{reply.url} answers {reply.status_code}: {reply.text[:500]}")
        return reply


class SGLangRollout(BaseRollout):
    """Generates with SGLang; `rollout.engine_kwargs.sglang` is passed on and wins over what is derived here.

    With `base_url` in it, a server's address, that server is asked; `tp_size` then says what it was started with. It
    serves all ranks, of which the first sends it the weights and puts it to sleep.
    """

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.saved = SavedForm(model_config.hf_config)
        # What runs: its own id, the engine's id, and how many tokens it asked for.
        self.asked: dict[asyncio.Task[dict[str, Any]], tuple[str, str, int]] = {}
        self.asleep: set[Part] = set()
        own = config.engine_kwargs.get("sglang", {})
        self.shared = "base_url" in own
        self.client = (
            Server(**own) if self.shared else LocalEngine(self.engine_args(model_config) | own)
        )
        self.leads = not self.shared or rank() == 0
        self.begin()

    def engine_args(self, spec: ModelSpec) -> dict[str, Any]:
        """Derives SGLang's settings from the config's."""
        cfg, model = self.config, spec.config
        # Ids go in and come out.
        args = {"model_path": spec.path, "dtype": cfg.dtype, "skip_tokenizer_init": True}
        args |= {"context_length": self.max_model_len, "max_running_requests": cfg.max_num_seqs}
        args |= {
            "mem_fraction_static": cfg.gpu_memory_utilization,
            "enable_memory_saver": cfg.free_cache_engine,
        }
        args |= {
            "disable_cuda_graph": cfg.enforce_eager,
            "disable_radix_cache": not cfg.enable_prefix_caching,
        }
        args["chunked_prefill_size"] = (
            cfg.max_num_batched_tokens if cfg.enable_chunked_prefill else -1
        )
        args["json_model_override_args"] = json.dumps(dict(model.override_config))
        return args | {"trust_remote_code": model.trust_remote_code}

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        stops, rid = list(sampling.stop_token_ids), uuid4().hex
        params = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        params |= {"max_new_tokens": sampling.max_tokens, "sampling_seed": sampling.seed}
        params |= {"stop_token_ids": stops, "ignore_eos": not stops}
        asked = self.client.generate(
            input_ids=prompt_ids, sampling_params=params, return_logprob=True, rid=rid
        )
        self.asked[self.client.loop.create_task(asked)] = request_id, rid, sampling.max_tokens

    def step(self) -> list[Completion]:
        """Waits a moment for a request to finish; returns all that have."""
        if not self.asked:
            return []
        first = asyncio.wait(self.asked, timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.client.loop.run_until_complete(first)
        return [self._completion(task) for task in done]

    def _completion(self, task: asyncio.Task[dict[str, Any]]) -> Completion:
        request_id, _, asked = self.asked.pop(task)
        try:
            meta = task.result()["meta_info"]
        except ValueError as error:
            logger.warning("SGLang refuses a request: %s", error)
            meta = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}
        log_probs, ids = ([entry[i] for entry in meta["output_token_logprobs"]] for i in (0, 1))
        reason = finish_reason(meta["finish_reason"]["type"], len(ids), asked)
        return Completion(
            request_id=request_id, token_ids=ids, log_probs=log_probs, finish_reason=reason
        )

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences as prompts, behind which a token is sampled that nobody reads."""
        given = {
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1},
        }
        run = self.client.loop.run_until_complete
        answers = [run(self.client.generate(input_ids=ids, **given)) for ids in sequences]
        return [
            [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
            for answer in answers
        ]

    def begin(self) -> None:
        """Drops cached prefixes, and requests that a batch before left behind.

        Raises:
            RuntimeError: the requests of others go on in the server.
        """
        for _, rid, _ in self.asked.values():
            self.client.call("abort_request", rid=rid)
        while self.asked:
            self.step()
        deadline = time.monotonic() + FLUSH_S
        while self.leads and not self.client.flush():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "SGLang keeps cached prefixes while requests run, which are not this run's"
                )
            time.sleep(STEP_S)
        self._await_leader()

    def update_weights(self, weights: NamedTensors, manifest: Manifest) -> None:
        """Replaces all weights, a bucket at a time, and drops the prefixes that were computed with the old ones."""
        check_manifest(manifest, weight_manifest(self.saved.model))
        named, sizes = tee(self.saved.of(as_announced(weights, manifest)))
        sent = accumulate(tensor.nbytes for _, tensor in sizes)
        for _, bucket in groupby(
            zip(named, sent, strict=True), key=lambda entry: entry[1] // BUCKET_BYTES
        ):
            if self.leads:
                self.client.send([tensor for tensor, _ in bucket])
        self.begin()

    def sleep(self) -> None:
        """Gives the GPU memory of cache and weights back, which are not kept."""
        if self.config.free_cache_engine and not self.asleep:
            self.begin()
            self._move("release_memory_occupation", {"kv_cache", "weights"})
            self.asleep = {"kv_cache", "weights"}

    def wake_up(self, part: Part | None = None) -> None:
        """Takes the memory back."""
        if parts := self.asleep & ({part} if part else self.asleep):
            self._move("resume_memory_occupation", parts)
            self.asleep -= parts

    def _move(self, verb: str, parts: set[Part]) -> None:
        if self.leads:
            self.client.call(verb, tags=sorted(parts))
        self._await_leader()

    def _await_leader(self) -> None:
        if self.shared and world_size() > 1:
            dist.barrier()
