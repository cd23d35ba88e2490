"""What tests of the core have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from training import features as registry
from training.config.translator import key_translator
from workers.rollout.kinds import kinds


@pytest.fixture
def no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of features of which none is there; sections that were read before stay."""
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "features")
    (tmp_path / "features").mkdir()
    caches = (registry.features, registry.absent_features, key_translator, kinds)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "features"
    for cache in caches:
        cache.cache_clear()
