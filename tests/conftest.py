"""Fixtures that all tests share: the tiny task and game, made once, and a Ray.

With pytest-xdist (`make test`) the tests of a group stay on one worker: all that start Ray, all
that start vLLM, else those of a file, whose own fixtures are then made once.
"""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each of the workers, and of the ranks and programs that tests start, has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers would give way to everything else that runs, the other half of the tests too.
os.environ.setdefault("RAY_worker_niceness", "0")
# A probe that raises fails its test, where a run would go on without it.
os.environ.setdefault("PROBE_FAULTS", "raise")
# Programs that tests start would compile what they import each time: half of what a start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_quickstart import warm_up as warm_up_game
from examples.prepare_tiny_prompts import make_model, make_tokenizer, warm_up, write_prompts
from scripts.browser import Browser, what_is_missing
from training import observers
from training.core_algos import registry

PROJECT = Path(__file__).resolve().parent.parent
# Their tests start programs that start a Ray of their own.
RAY_FILES = ("test_cleanup.py", "test_failing_ranks.py", "test_jobs.py", "test_nodes.py")
# The long ones come first, so that both workers end at about the same time.
FIRST_GROUPS = ("ray", "vllm")
# An observer's error fails its test.
observers.RAISES = True
# A busy machine misses any.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the whole runs of features as long; groups and orders the tests for pytest-xdist.

    Without it they keep their order.
    """
    for item in items:
        if is_run_of_a_feature(item):
            item.add_marker(pytest.mark.long)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(worker_group(item)))
    items.sort(key=starts_after)


def worker_group(item: pytest.Item) -> str:
    """Returns the name of the group of tests that are run by one worker, one after another."""
    if item.path.name in RAY_FILES or "cluster" in getattr(item, "fixturenames", ()):
        return "ray"
    if item.get_closest_marker("vllm"):
        return "vllm"
    return item.path.relative_to(PROJECT / "tests").with_suffix("").as_posix()


def is_run_of_a_feature(item: pytest.Item) -> bool:
    """Returns whether the test stands in tests/features/NAME/runs."""
    parts = item.path.relative_to(PROJECT / "tests").parts
    return parts[0] == "features" and "runs" in parts


def starts_after(item: pytest.Item) -> int:
    """Returns how late a test's group starts: long groups, then whole runs, then unit tests."""
    group = worker_group(item)
    if group in FIRST_GROUPS:
        return FIRST_GROUPS.index(group)
    is_unit = group.startswith(("unit/", "features/")) and "/runs/" not in group
    return len(FIRST_GROUPS) + int(is_unit)


@pytest.fixture
def registries_as_they_were() -> Iterator[None]:
    """Takes the estimators and losses that a test registers out again after it."""
    registry.load_built_in()
    tables: list[dict[str, Any]] = [
        registry.ADV_ESTIMATOR_REGISTRY,
        registry.POLICY_LOSS_REGISTRY,
        registry.ESTIMATOR_NEEDS,
        registry.ESTIMATOR_FACTS,
        registry.ESTIMATORS_THAT_READ_ROWS,
        registry.LOSSES_THAT_READ_ROWS,
    ]
    contents = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, contents, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Runs a Ray of four CPUs, which the runs of a module's tests join.

    Not one for the whole session: a process whose Ray is lost ends, and with it every test of the
    worker that comes later.
    """
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (untied), train.parquet and val.parquet, after a very short warm-up."""
    folder = tmp_path_factory.mktemp("task")
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, rng, steps=60)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prompts(folder / "train.parquet", 64, rng)
    write_prompts(folder / "val.parquet", 16, rng)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tied embeddings, random weights."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = LlamaConfig.from_dict(
        make_model(tokenizer).config.to_dict() | {"tie_word_embeddings": True}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, which knows the form of the quickstart's game after a short warm-up."""
    folder = tmp_path_factory.mktemp("game")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up_game(model, tokenizer, random.Random(0), steps=40)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


class SharedBrowser:
    """Keeps a headless browser open for all tests, and another where a test has ended it."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing
        self._browser: Browser | None = None

    def running(self) -> Browser:
        """Returns the browser, or opens one."""
        if self._browser is None or self._browser.is_gone:
            self._browser = self._closing.enter_context(Browser())
        return self._browser


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[SharedBrowser]:
    """What keeps the browser; see `browser`."""
    missing = what_is_missing()
    if missing:
        pytest.skip(missing)
    with ExitStack() as closing:
        yield SharedBrowser(closing)


@pytest.fixture
def browser(shared_browser: SharedBrowser) -> Browser:
    """The browser, of the usual size, which has said and asked for nothing yet."""
    chromium = shared_browser.running()
    chromium.resize(1400, 900)
    chromium.open("about:blank")
    chromium.console()
    chromium.requests()
    return chromium
