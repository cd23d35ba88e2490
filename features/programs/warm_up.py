"""First requests of SDKs, made before programs are forked, which then find all of it imported.

An SDK imports half of itself with its first request, and reads the certificates of the web for each
client, also of a server without TLS. The process from which programs are forked
(program_process.py) does both once, against a server of its own that lives for as long. An episode
of one request with OpenAI's SDK then takes 25 ms, not 160; without the server, where clients are
made and ask nothing, it would take 45. Standard library alone, as there. Invariant: afterwards the
process has one thread, and no connection; a program that is forked from it finds nothing that it
could not have made itself.
"""

import asyncio
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

# The longest that a request may take, in seconds.
REQUEST_S = 20.0
# TLS contexts that a program finds made, of each kind that the SDKs ask for.
CONTEXTS = 2
ASKED = [{"role": "user", "content": "Hello"}]
CHAT_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
MESSAGES_ANSWER = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "policy",
    "content": [{"type": "text", "text": "Hello"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


class AnswersAlike(BaseHTTPRequestHandler):
    """Gives every request the same answer."""

    def do_POST(self) -> None:
        """Answers."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = MESSAGES_ANSWER if self.path.endswith("/messages") else CHAT_ANSWER
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


class ContextsAhead:
    """Stands in the place of `ssl.create_default_context`; hands out contexts that are made.

    To read the web's certificates takes 17 ms of a processor. Each context is handed out once, so
    no two clients share one; with other arguments, or once they are spent, a new one is made. What
    was handed out is never freed: that alone would copy a megabyte of shared memory.
    """

    def __init__(self) -> None:
        self.create = ssl.create_default_context
        self.asked: list[Any] = []
        self.made: list[tuple[Any, ssl.SSLContext]] = []
        self.handed_out: list[ssl.SSLContext] = []

    def __call__(self, *arguments: Any, **named: Any) -> ssl.SSLContext:
        """Returns a context."""
        asked = (arguments, named)
        for place, (made_for, context) in enumerate(self.made):
            if made_for == asked:
                del self.made[place]
                self.handed_out.append(context)
                return context
        if asked not in self.asked:
            self.asked.append(asked)
        return self.create(*arguments, **named)

    def make(self) -> None:
        """Makes contexts with all arguments that were asked with."""
        self.made = []
        for arguments, named in self.asked:
            for _ in range(CONTEXTS):
                context = self.create(*arguments, **named)
                self.made.append(((arguments, named), context))


def warm_up() -> None:
    """Makes a first request with each SDK that was imported; tells of what fails, and goes on."""
    # Every connection looks its host up, which imports the tables of names in all alphabets.
    socket.getaddrinfo("127.0.0.1", 0)
    sdks = [name for name in FIRST_REQUESTS if name in sys.modules]
    if not sdks:
        return
    contexts = ContextsAhead()
    ssl.create_default_context = contexts
    with HTTPServer(("127.0.0.1", 0), AnswersAlike) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            for name in sdks:
                try:
                    FIRST_REQUESTS[name](f"http://127.0.0.1:{server.server_port}")
                # A program that needs it says what is wrong.
                except Exception as error:
                    print(f"programs.preload: {name}: a first request: {error!r}", file=sys.stderr)
        finally:
            server.shutdown()
            thread.join()
    contexts.make()


def ask_openai(url: str) -> None:
    """Makes a request with each of the clients of OpenAI's SDK."""
    import openai

    options: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": REQUEST_S,
    }
    ask: dict[str, Any] = {"model": "policy", "messages": ASKED}
    with openai.OpenAI(**options) as client:
        client.chat.completions.create(**ask)

    async def ask_at_once() -> None:
        async with openai.AsyncOpenAI(**options) as client:
            await client.chat.completions.create(**ask)

    asyncio.run(ask_at_once())


def ask_anthropic(url: str) -> None:
    """Makes a request with each of the clients of Anthropic's SDK."""
    import anthropic

    options: dict[str, Any] = {
        "base_url": url,
        "api_key": "none",
        "max_retries": 0,
        "timeout": REQUEST_S,
    }
    ask: dict[str, Any] = {"model": "policy", "messages": ASKED, "max_tokens": 1}
    with anthropic.Anthropic(**options) as client:
        client.messages.create(**ask)

    async def ask_at_once() -> None:
        async with anthropic.AsyncAnthropic(**options) as client:
            await client.messages.create(**ask)

    asyncio.run(ask_at_once())


FIRST_REQUESTS: dict[str, Callable[[str], None]] = {
    "openai": ask_openai,
    "anthropic": ask_anthropic,
}
