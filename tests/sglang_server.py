"""What SGLang promises, over a real tiny model: its HTTP interface, and its engine's signatures.

The interface stands on a real socket. Weights are unpickled by the same rule as SGLang's own
unpickler has: only what torch and the standard library name.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from training.config import RolloutConfig
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec
from workers.rollout.engine import Sampling

KNOWN = {
    "temperature",
    "top_k",
    "top_p",
    "max_new_tokens",
    "sampling_seed",
    "stop_token_ids",
    "ignore_eos",
}


class Model:
    """Answers as SGLang does, one request at a time; remembers what it was asked, in order."""

    def __init__(self, spec: ModelSpec, context: int = 40) -> None:
        config = RolloutConfig(dtype="float32", response_length=context, max_model_len=context)
        self.engine, self.context = HFRollout(config, spec), context
        self.engine.module = spec.causal_lm(trainable=False)
        self.lock = threading.Lock()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.released: set[str] = set()
        # Requests wait until they are aborted.
        self.hang = False
        # Requests get no answer.
        self.dead = False
        # How often the cache is not flushed.
        self.busy = 0
        self.aborted: set[str] = set()

    @torch.no_grad()
    def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], rid: str = "", **given: Any
    ) -> dict:
        while self.hang and rid not in self.aborted:
            threading.Event().wait(0.005)
        assert given["return_logprob"] and not self.released and sampling_params.keys() <= KNOWN
        if len(input_ids) >= self.context:
            raise ValueError(
                f"The input ({len(input_ids)} tokens) is longer than the context "
                f"({self.context} tokens)."
            )
        if rid in self.aborted:
            return {
                "output_ids": [],
                "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []},
            }
        room = self.context - len(input_ids)
        defaults = {
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "sampling_seed": 7,
            "stop_token_ids": [],
        }
        params = defaults | sampling_params
        sampling = Sampling(
            **{name: params[name] for name in ("temperature", "top_k", "top_p")},
            max_tokens=min(params["max_new_tokens"], room),
            seed=params["sampling_seed"],
            stop_token_ids=() if params.get("ignore_eos") else tuple(params["stop_token_ids"]),
        )
        with self.lock:
            (done,) = self.engine.inference([input_ids], sampling)
            told = [None, *self.engine.score([input_ids])[0]]
        meta: dict[str, Any] = {"finish_reason": {"type": done.finish_reason}, "id": rid}
        pairs = zip(done.log_probs, done.token_ids, strict=True)
        meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
        if given.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = [
                [log_prob, token, None] for log_prob, token in zip(told, input_ids, strict=True)
            ]
        return {"output_ids": done.token_ids, "meta_info": meta}

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Takes the tensors that it knows, by their names in the checkpoint."""
        targets = self.engine.module.state_dict()
        for name, tensor in tensors:
            targets[name].copy_(tensor)

    def move(self, verb: str, tags: list[str]) -> None:
        for tag in tags:
            if verb == "release_memory_occupation":
                self.released.add(tag)
            else:
                self.released.remove(tag)

    def flush(self) -> bool:
        self.busy -= 1
        return self.busy < 0


class Unpickler(pickle.Unpickler):
    """Finds what torch and collections have, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.split(".")[0] in ("torch", "collections"), (module, name)
        return super().find_class(module, name)


@contextmanager
def serving(model: Model) -> Iterator[str]:
    """Yields the address of a server that answers by the model."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            verb = self.path.strip("/")
            status, told = 200, b"null"
            if verb == "generate":
                try:
                    model.asked.append((verb, body))
                    if model.dead:
                        self.close_connection = True
                        return
                    told = json.dumps(model.generate(**body)).encode()
                except ValueError as error:
                    status, told = 400, json.dumps({"error": {"message": str(error)}}).encode()
            elif verb == "flush_cache":
                status, told = (200 if model.flush() else 400), b"Cache flushed.\n"
            else:
                model.asked.append((verb, body))
                answer(model, verb, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        # A step's requests come at once; beyond 5, its default, some would be reset.
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answer(model: Model, verb: str, body: dict[str, Any]) -> None:
    if verb == "update_weights_from_tensor":
        # Each rank of the server has its own.
        for packed in body["serialized_named_tensors"]:
            model.load(Unpickler(io.BytesIO(base64.b64decode(packed))).load())
    elif verb == "abort_request":
        model.aborted.add(body["rid"])
    else:
        model.move(verb, body["tags"])


def engine_class(model: Model) -> type:
    """Makes a class with the methods of `sglang.Engine` that are called.

    Its calls run its loop, as SGLang's do.
    """

    class Engine:
        def __init__(self, **settings: Any) -> None:
            self.settings, self.loop = settings, asyncio.new_event_loop()
            self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)

        def _abort(self, rid: str = "", abort_all: bool = False) -> None:
            model.aborted.add(rid)

        async def async_generate(self, **request: Any) -> dict[str, Any]:
            return await asyncio.to_thread(model.generate, **request)

        def _run(self, verb: str, told: Any = None) -> Any:
            model.asked.append((verb, {}))
            return self.loop.run_until_complete(asyncio.sleep(0, told))

        def flush_cache(self) -> Any:
            return self._run("flush_cache", SimpleNamespace(success=model.flush()))

        def update_weights_from_tensor(
            self, named_tensors: list, load_format: str | None = None, flush_cache: bool = True
        ) -> tuple[bool, str]:
            model.load(named_tensors)
            return self._run("update_weights_from_tensor", (True, "Success"))

        def release_memory_occupation(self, tags: list[str] | None = None) -> None:
            model.move("release_memory_occupation", tags or [])
            self._run("release_memory_occupation")

        def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
            model.move("resume_memory_occupation", tags or [])
            self._run("resume_memory_occupation")

    return Engine
