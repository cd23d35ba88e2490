"""One question to a server: its deadline, its retries, and what an answer must be.

Invariant: whatever the server does (hang, close the connection, send garbage or gigabytes), a
question ends within its deadline, with an answer or a ModelError; no message holds the key.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from custom.model_errors import ErrorKind, ModelError, ModelTimeout
from custom.model_usage import USAGE
from features.judges.model_settings import ModelSettings
from features.judges.slots import Slots

# The most bytes of an answer; a longer one is not read to its end.
MAX_ANSWER_BYTES = 16 * 2**20
# Characters of an answer that a message shows.
MAX_SHOWN_CHARS = 200
# Seconds before the first further try; the next ones take twice as long, up to the longest.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
# Status codes that are tried again, beside 5xx.
TRANSIENT = (408, 425, 429)


@dataclass(frozen=True)
class ServerAnswer:
    """Holds what a server sent, whatever that is."""

    status: int
    content: bytes
    retry_after_s: float | None


class TryAgain(Exception):
    """Ends a try that may go better another time.

    Attributes:
        kind: what becomes of it after the last try.
        wait_s: for how long the server wants to be left alone; None: it does not say.
    """

    def __init__(self, message: str, kind: ErrorKind, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.wait_s = wait_s


class Requests:
    """Sends a model's questions; made and used in one event loop."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        folder = Path(settings.folder, "slots") if settings.folder else None
        self.slots = Slots(settings.max_concurrency, folder)
        self.url = f"{settings.base_url.rstrip('/')}/chat/completions"
        limits = httpx.Limits(max_connections=settings.max_concurrency)
        # The deadline is that of the whole question.
        self.client = httpx.AsyncClient(timeout=None, limits=limits)

    async def send(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a question when its turn has come; returns the server's JSON, counted.

        Raises:
            ModelError: there is no answer.
        """
        counts = dict.fromkeys(("calls", "retries", "failures", "seconds"), 0.0)
        counts["calls"] = 1.0
        async with self.slots.turn():
            begun_at = time.monotonic()
            try:
                answer = await self._send_in_time(body, counts, begun_at)
                counts |= self._tokens(answer)
                return answer
            except BaseException:
                counts["failures"] = 1.0
                raise
            finally:
                counts["seconds"] = time.monotonic() - begun_at
                USAGE.add({self.settings.name: counts})

    async def _send_in_time(
        self, body: Mapping[str, Any], counts: dict[str, float], begun_at: float
    ) -> dict[str, Any]:
        last: list[TryAgain] = []
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await self._send_until_answered(body, counts, begun_at, last)
        except TimeoutError:
            before = f"; before that: {last[-1]}" if last else ""
            raise ModelTimeout(
                f"{self.settings.place} did not answer within "
                f"timeout_s={self.settings.timeout_s:g}{before}",
                "timeout",
            ) from None

    async def _send_until_answered(
        self,
        body: Mapping[str, Any],
        counts: dict[str, float],
        begun_at: float,
        last: list[TryAgain],
    ) -> dict[str, Any]:
        """Tries until there is an answer, or as often as the settings have it."""
        tries = self.settings.max_retries + 1
        for number in range(tries):
            try:
                return await self._try(body)
            except TryAgain as error:
                last.append(error)
            is_last = number == tries - 1
            failure = last[-1]
            pause_s = failure.wait_s
            if pause_s is None:
                most = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
                pause_s = random.uniform(0.5, 1.0) * most
            left_s = self.settings.timeout_s - (time.monotonic() - begun_at)
            if is_last or pause_s >= left_s:
                again = f", in {number + 1} tries" if number else ""
                raise ModelError(f"{self.settings.place} {failure}{again}", failure.kind)
            counts["retries"] += 1.0
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _try(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a question once. Raises TryAgain, or ModelError where another try is in vain."""
        key = self._key()
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            answer = await self._post(body, headers)
        except httpx.TransportError as error:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise TryAgain(f"cannot be reached ({why})", "unreachable") from None
        except httpx.HTTPError as error:
            raise self._error(f"sent what is no answer ({error})", "bad_answer") from None
        if answer.status != 200:
            self._refuse(answer, key)
        try:
            decoded = json.loads(answer.content)
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict):
            said = _shown(answer.content, key)
            raise self._error(f"sent what is no JSON object: {said}", "bad_answer")
        return decoded

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ServerAnswer:
        content = json.dumps(body).encode()
        sent = dict(headers) | {"Content-Type": "application/json"}
        async with self.client.stream("POST", self.url, content=content, headers=sent) as response:
            received = bytearray()
            async for part in response.aiter_bytes():
                received += part
                if len(received) > MAX_ANSWER_BYTES:
                    raise self._error(
                        f"sent more than {MAX_ANSWER_BYTES:,} bytes; max_tokens bounds an answer",
                        "bad_answer",
                    )
            return ServerAnswer(
                response.status_code,
                bytes(received),
                _seconds_of(response.headers.get("Retry-After")),
            )

    def _refuse(self, answer: ServerAnswer, key: str) -> None:
        """Raises TryAgain where a later try may go better, else ModelError."""
        said = f"answered {answer.status}: {_shown(answer.content, key)}"
        if answer.status == 429:
            raise TryAgain(said, "busy", answer.retry_after_s)
        if answer.status >= 500 or answer.status in TRANSIENT:
            raise TryAgain(said, "server_error", answer.retry_after_s)
        raise self._error(said, "refused")

    def _key(self) -> str:
        name = self.settings.key_env
        if name is None:
            return ""
        key = os.environ.get(name, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise self._error(
                f"needs its key in the environment variable {name}, which in this process is "
                "empty or no key; set it where the run starts (under Ray on every node)",
                "not_set_up",
            )
        return key

    def _error(self, what: str, kind: ErrorKind) -> ModelError:
        return ModelError(f"{self.settings.place} {what}", kind)

    def _tokens(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Returns the tokens that the server counted, and what they cost."""
        usage = answer.get("usage")
        counts = {"prompt_tokens": 0.0, "completion_tokens": 0.0}
        if isinstance(usage, dict):
            for name in counts:
                value = usage.get(name)
                if isinstance(value, int) and 0 <= value < 2**40:
                    counts[name] = float(value)
        cost = (
            counts["prompt_tokens"] * self.settings.price_in
            + counts["completion_tokens"] * self.settings.price_out
        )
        return counts | {"cost": cost / 1e6}


def _shown(content: bytes, key: str) -> str:
    """Returns the beginning of an answer for a message, in one line and without the key."""
    text = " ".join(content[: 20 * MAX_SHOWN_CHARS].decode("utf-8", "replace").split())
    if key:
        text = text.replace(key, "***")
    return repr(text[:MAX_SHOWN_CHARS])


def _seconds_of(retry_after: str | None) -> float | None:
    """Reads the header Retry-After: seconds, or a date; None where it says neither."""
    if retry_after is None:
        return None
    try:
        if retry_after.strip().replace(".", "", 1).isdecimal():
            return float(retry_after)
        until = parsedate_to_datetime(retry_after)
        return max(0.0, (until - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
