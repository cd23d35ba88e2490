"""Lists the fields of a batch, from `fields.yaml`: shape, dtype, writer and meaning."""

from pathlib import Path
from typing import NamedTuple

import yaml


class Field(NamedTuple):
    """Describes what one field holds; B = rows, P = prompt length, R = response length (tokens)."""

    shape: str
    dtype: str
    writer: str
    meaning: str


def _read_fields() -> dict[str, Field]:
    text = Path(__file__).with_name("fields.yaml").read_text(encoding="utf-8")
    return {name: Field(*entry) for name, entry in yaml.safe_load(text).items()}


FIELDS: dict[str, Field] = _read_fields()
# Those that a batch is given, whatever a dataset's rows have.
GIVEN_FIELDS = frozenset(name for name, told in FIELDS.items() if told.writer != "the dataset")
# The writer of those that come of a feature's keeper (workers/rollout/keepers.py).
KEEPERS = "a keeper of episodes"
