"""Answers by the content of their request.

Invariant: an answer is found by everything that was sent but the key; a disk that is full, or a
file that is damaged, costs a lookup and nothing else.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.warn_once import warn_once

# Answers in memory; the longest unused make room. One of more characters is not kept.
MAX_ANSWERS = 20_000
MAX_KEPT_CHARS = 100_000


def content_key(base_url: str, body: Mapping[str, Any]) -> str:
    """Returns 40 characters that stand for a request, the same in every process."""
    content = json.dumps([base_url, body], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=20).hexdigest()


class AnswerCache:
    """Keeps answers in memory, and in files under `folder` where that is given."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        """Returns the answer to a request; None where none is kept."""
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        answer = self._read(key)
        if answer is not None:
            self._remember(key, answer)
        return answer

    def put(self, key: str, answer: str) -> None:
        """Keeps an answer, unless it is very long."""
        if len(answer) > MAX_KEPT_CHARS:
            return
        self._remember(key, answer)
        if self._folder is None:
            return
        try:
            self._write(self._file_of(key), answer)
        except OSError as error:
            warn_once(__name__, f"answers of models are not kept in {self._folder}: {error}")

    def _remember(self, key: str, answer: str) -> None:
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def _file_of(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, key: str) -> str | None:
        if self._folder is None:
            return None
        # There is no such file, or it is damaged.
        with suppress(OSError, ValueError):
            answer = json.loads(self._file_of(key).read_text(encoding="utf-8"))
            if isinstance(answer, str):
                return answer
        return None

    def _write(self, file: Path, answer: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: several processes may write one answer.
        part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            part.write_text(json.dumps(answer), encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
