"""The settings of a model, as processes hand them on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Describes a model behind an OpenAI-compatible server.

    Attributes:
        name: what the config and the metrics call it.
        base_url: such as http://127.0.0.1:8000/v1.
        model: its name on the server.
        key_env: the environment variable with its key; None: it wants none.
        timeout_s: seconds for a question whose turn has come, retries included.
        max_retries: after no connection, 408, 425, 429 or 5xx.
        max_concurrency: requests at once; over all processes of a machine that have one `folder`.
        cache: where answers at temperature 0 are kept.
        price_in, price_out: of a million tokens of questions, and of answers.
        body: further fields of every request.
        folder: the run's, for this model; None: nothing is shared or kept on a disk.
    """

    name: str
    base_url: str
    model: str
    key_env: str | None = None
    timeout_s: float = 60.0
    max_retries: int = 4
    max_concurrency: int = 16
    cache: Literal["never", "memory", "disk"] = "memory"
    price_in: float = 0.0
    price_out: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None

    @property
    def place(self) -> str:
        """Returns how messages call the model."""
        return f"model {self.name} ({self.model} at {self.base_url})"
