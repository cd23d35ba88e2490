"""A small OpenAI-compatible server that does what a test asks for, good or bad."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: Any, **more: Any) -> bytes:
    """A chat completion with this text."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return json.dumps({"choices": [choice], "usage": usage} | more).encode()


@dataclass
class ModelServer:
    """Holds what the server was sent, and how it is to answer.

    Attributes:
        bodies, keys: of the requests, in order.
        answer: writes the answer to a request, by its number from 0 on.
        at_once, most_at_once: requests that it is answering.
    """

    answer: Callable[[BaseHTTPRequestHandler, int], None]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)


def reply(
    handler: BaseHTTPRequestHandler, status: int = 200, content: bytes = b"", **headers: str
) -> None:
    """Answers a request."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


def say(text: Any) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """Answers every request with this text."""
    return lambda handler, number: reply(handler, content=completion(text))


def hang(handler: BaseHTTPRequestHandler, number: int) -> None:
    time.sleep(60)


def trickle(handler: BaseHTTPRequestHandler, number: int) -> None:
    """Sends a byte now and then, so that no single read takes long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def close_early(handler: BaseHTTPRequestHandler, number: int) -> None:
    handler.close_connection = True
    handler.connection.close()


def cut(handler: BaseHTTPRequestHandler, number: int) -> None:
    """Promises more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.close_connection = True


def flood(handler: BaseHTTPRequestHandler, number: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"x" * 2**20)


def bomb(handler: BaseHTTPRequestHandler, number: int) -> None:
    """Sends little that unpacks to much, though nobody asked for it packed."""
    reply(handler, content=gzip.compress(b" " * 2**26), Content_Encoding="gzip")


def garbage(handler: BaseHTTPRequestHandler, number: int) -> None:
    handler.wfile.write(b"\x00\xff no http at all\r\n\r\n")
    handler.close_connection = True


@contextmanager
def model_server(answer: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[ModelServer]:
    """Runs a server on a free port of this machine."""
    server = ModelServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            with server.lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.keys.append(self.headers.get("Authorization", ""))
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            try:
                server.answer(self, number)
            except OSError:
                # The client has hung up.
                self.close_connection = True
            finally:
                with server.lock:
                    server.at_once -= 1

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # A hang outlives its test.
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, *arguments: Any) -> None:
            pass

    http = Server(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
