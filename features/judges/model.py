"""A model that can be asked."""

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from custom.loop_thread import LOOP_THREAD
from custom.model_errors import ModelError
from custom.model_usage import USAGE
from features.judges.cache import AnswerCache, content_key
from features.judges.model_settings import ModelSettings

if TYPE_CHECKING:
    # It brings an HTTP client, which runs without models do without.
    from features.judges.requests import Requests

# A text, which is one user message, or chat messages in OpenAI's form.
Question: TypeAlias = str | Sequence[Mapping[str, Any]]


class Model:
    """Asks a model behind an OpenAI-compatible server.

    Any thread may ask; `ask_async` may be awaited in any event loop.

    model = Model(ModelSettings(name="judge", base_url="http://127.0.0.1:8000/v1", model="m"))
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        folder = None
        if settings.cache == "disk" and settings.folder:
            folder = Path(settings.folder, "answers")
        self._answers = AnswerCache(folder)
        self._lock = threading.Lock()
        self._requests: Requests | None = None
        self._pid = 0

    def ask(
        self,
        question: Question,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        cache: bool | None = None,
        **body: Any,
    ) -> str:
        """Returns the model's answer to a question.

        Args:
            question: a text, or messages.
            temperature: None: that of the settings' `body`, else 0.
            max_tokens: of the answer; None: the server's limit.
            cache: take the answer to an equal question, and keep this one; None: at temperature 0.
            body: further fields of the request: stop, seed, response_format, …
        Raises:
            ModelError: there is no answer.
        """
        request = self._body(question, temperature, max_tokens, body)
        return LOOP_THREAD.run(self._answer(request, cache))

    async def ask_async(
        self,
        question: Question,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        cache: bool | None = None,
        **body: Any,
    ) -> str:
        """Does as `ask`, for callers with an event loop."""
        request = self._body(question, temperature, max_tokens, body)
        return await LOOP_THREAD.run_from(self._answer(request, cache))

    def ask_all(
        self,
        questions: Sequence[Question],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        cache: bool | None = None,
        **body: Any,
    ) -> list[str]:
        """Asks several questions side by side; the arguments are those of `ask`.

        Returns:
            the answers, in order.
        Raises:
            ModelError: of the first question without an answer, when all have ended.
        """
        requests = [self._body(question, temperature, max_tokens, body) for question in questions]
        answers = LOOP_THREAD.run(self._answers_to(requests, cache))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [str(answer) for answer in answers]

    async def complete_async(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all that the server answers to the body of a chat completion.

        `model` in it is the settings'; without a temperature it is as in `ask`, and so is what is
        kept. Raises ModelError where there is no answer.
        """
        request = {"temperature": 0.0, **self.settings.body, **body, "model": self.settings.model}
        return await LOOP_THREAD.run_from(self._whole_answer(request))

    def check(self) -> None:
        """Sends a small request, whose answer is not looked at. Raises ModelError."""
        request = self._body("Say yes.", None, 1, {})
        LOOP_THREAD.run(self._send(request))

    def _body(
        self,
        question: Question,
        temperature: float | None,
        max_tokens: int | None,
        further: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the request of a question."""
        body: dict[str, Any] = {"temperature": 0.0, **self.settings.body, **further}
        body["model"] = self.settings.model
        body["messages"] = _messages(question)
        if temperature is not None:
            body["temperature"] = temperature
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return body

    async def _answers_to(
        self, requests: Sequence[dict[str, Any]], cache: bool | None
    ) -> list[str | BaseException]:
        answers = [self._answer(request, cache) for request in requests]
        return await asyncio.gather(*answers, return_exceptions=True)

    async def _answer(self, body: dict[str, Any], cache: bool | None) -> str:
        """Returns the text of the kept answer to a request, or of the server's."""
        key = self._key_of(body, body, cache)
        kept = self._kept(key)
        if kept is not None:
            return kept
        answer = await self._send(body)
        try:
            text = self._text_of(answer)
        except ModelError:
            USAGE.add({self.settings.name: {"failures": 1.0}})
            raise
        if key:
            self._answers.put(key, text)
        return text

    async def _whole_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the kept answer to a request, or the server's, with all of its fields."""
        key = self._key_of(body, {"whole": body}, None)
        kept = self._kept(key)
        if kept is not None:
            answer: dict[str, Any] = json.loads(kept)
            return answer
        answer = await self._send(body)
        try:
            self._choice_of(answer)
        except ModelError:
            USAGE.add({self.settings.name: {"failures": 1.0}})
            raise
        if key:
            self._answers.put(key, json.dumps(answer))
        return answer

    def _key_of(
        self, body: Mapping[str, Any], content: Mapping[str, Any], cache: bool | None
    ) -> str:
        """Returns under what the answer to a request is kept; "": it is not."""
        if cache is None:
            cache = body["temperature"] == 0
        keeps = cache and self.settings.cache != "never"
        return content_key(self.settings.base_url, content) if keeps else ""

    def _kept(self, key: str) -> str | None:
        """Returns what is kept under a key, and counts it."""
        kept = self._answers.get(key) if key else None
        if kept is not None:
            USAGE.add({self.settings.name: {"cached": 1.0}})
        return kept

    async def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            # A fork has another event loop.
            from features.judges.requests import Requests

            if self._requests is None or self._pid != os.getpid():
                self._requests = Requests(self.settings)
                self._pid = os.getpid()
            requests = self._requests
        return await requests.send(body)

    def _text_of(self, answer: Mapping[str, Any]) -> str:
        """Returns the text in an answer. Raises ModelError where there is none."""
        choice = self._choice_of(answer)
        text = choice["message"].get("content")
        if not isinstance(text, str):
            raise ModelError(
                f"{self.settings.place} answered without a text (finish_reason="
                f"{choice.get('finish_reason')!r}); one that thinks may need more max_tokens",
                "bad_answer",
            )
        return text

    def _choice_of(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer's first choice. Raises ModelError where it has no message."""
        try:
            choice: dict[str, Any] = answer["choices"][0]
            has_message = isinstance(choice["message"], dict)
        except (KeyError, IndexError, TypeError):
            has_message = False
        if not has_message:
            raise ModelError(
                f"{self.settings.place} answered without choices: its entries are "
                f"{', '.join(list(answer)[:8])}",
                "bad_answer",
            )
        return choice


def _messages(question: Question) -> list[dict[str, Any]]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    return [dict(message) for message in question]
