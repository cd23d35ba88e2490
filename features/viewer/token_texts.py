"""Turns token ids into the texts that a page shows, one text an id.

Invariant: texts of consecutive tokens, put together, read as the tokens decoded at once; a token
that holds a part of a character is shown with its neighbours, whole.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from training.config.plain_files import load_plain_yaml, read_plain_text, special_file

logger = logging.getLogger(__name__)
# A decoder puts this in place of bytes that are no character.
BROKEN = "\ufffd"


def find_tokenizer(run_dir: Path, episodes_dir: Path) -> tuple[Any, str]:
    """Loads the run's tokenizer: the one beside the episodes, else that of the config's model.

    Returns: the tokenizer, or None, and what is to be said where it is missing.
    """
    places = []
    for place in _places(run_dir, episodes_dir):
        places.append(place)
        if not place.is_dir() or special_file(place) is not None:
            continue
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(place, trust_remote_code=False), ""
        except Exception as error:  # whatever a damaged folder makes a library raise
            logger.warning("%s holds no tokenizer that can be read: %s", place, error)
    looked = " and ".join(map(str, places))
    return None, f"no tokenizer was found ({looked}): tokens are shown as their ids"


def _places(run_dir: Path, episodes_dir: Path) -> Iterator[Path]:
    """Yields where a run's tokenizer may be; its config is read only where it is not there."""
    yield episodes_dir / "tokenizer"
    model = _model_folder(run_dir / "config.yaml")
    if model is not None:
        yield model


def _model_folder(config: Path) -> Path | None:
    """Returns the folder that a run's config names as its model's, if it can be read."""
    try:
        entries = load_plain_yaml(read_plain_text(config))
        return Path(str(entries["actor_rollout_ref"]["model"]["path"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


class TokenTexts:
    """Holds the text of each id that was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # Ids of tokens that hold a part of a character.
        self._broken: set[int] = set()
        self._anchor: tuple[list[int], str] | None = None

    def of(self, token_id: int) -> str:
        """Returns an id's text inside a sentence; `#id` without a tokenizer."""
        if token_id not in self._texts:
            text = self._decode_one(token_id)
            self._texts[token_id] = text
            if BROKEN in text:
                self._broken.add(token_id)
        return self._texts[token_id]

    def joined(self, ids: np.ndarray) -> dict[int, str]:
        """Returns the places of `ids` whose text differs from their id's, with that text.

        Tokens that hold parts of characters are decoded with their neighbours: the first of them
        gets the whole text, the others none.
        """
        if self._tokenizer is None:
            return {}
        listed = ids.tolist()
        for one in set(listed) - self._texts.keys():
            self.of(one)
        if self._broken.isdisjoint(listed):
            return {}
        broken = [place for place, one in enumerate(listed) if one in self._broken]
        changed: dict[int, str] = {}
        for run in _runs(broken):
            text = self._tokenizer.decode(ids[run[0] : run[-1] + 1].tolist())
            if len(run) > 1 and BROKEN not in text:
                changed[run[0]] = text
                changed.update(dict.fromkeys(run[1:], ""))
        return changed

    def _decode_one(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"#{token_id} "
        try:
            anchor, before = self._anchor_text()
            text = self._tokenizer.decode([*anchor, token_id])
            if anchor and text.startswith(before):
                return text[len(before) :]
            return self._tokenizer.decode([token_id])
        except Exception:  # an id that the vocabulary lacks raises what its library likes
            return f"#{token_id} "

    def _anchor_text(self) -> tuple[list[int], str]:
        """Returns ids, and their text, behind which another's leading space is kept."""
        if self._anchor is None:
            ids = list(self._tokenizer.encode("a", add_special_tokens=False))
            self._anchor = (ids, self._tokenizer.decode(ids) if ids else "")
        return self._anchor


def _runs(places: list[int]) -> list[list[int]]:
    """Cuts ascending numbers into runs of consecutive ones."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
