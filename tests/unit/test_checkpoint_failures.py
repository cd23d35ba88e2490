"""A save that fails, by whatever error, costs that checkpoint alone, and names no folder."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.plain_state import CannotSave, kept_state
from tests.unit.test_checkpoint import Part, end_of_step, make_saver, trained
from training.run import checkpoint_contents, checkpoint_folders, checkpoint_manifest
from training.run.checkpoint_contents import DriverSnapshot, DriverState
from workers.model import state as model_state
from workers.model.checkpoint_writer import CheckpointWriter

# A run's workers silence it: a single rank saves by itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class RankDied(Exception):
    """Plays Ray's."""

    __module__ = "ray.exceptions"


class FailingPart(Part):
    """Raises in the second save: as it begins, or where its end is asked for."""

    def __init__(self, error: BaseException, where: str) -> None:
        super().__init__(seed=2)
        self.error = error
        self.where = where
        self.saves = 0

    def save_checkpoint(self, folder: str) -> None:
        self.saves += 1
        if self.saves == 2 and self.where == "begins":
            raise self.error
        super().save_checkpoint(folder)

    def checkpoint_written(self, wait: bool) -> bool:
        written = super().checkpoint_written(wait)
        if self.saves == 2 and self.where == "ends":
            raise self.error
        return written


ERRORS = (
    *(KeyError("state"), NotImplementedError("a list"), RuntimeError("odd"), MemoryError()),
    *(SystemExit(1), RankDied("rank 1")),
)


@pytest.mark.parametrize(
    ("error", "where"), [*itertools.product(ERRORS, ["begins"]), (ERRORS[0], "ends")]
)
def test_whatever_a_save_raises_the_older_checkpoint_stays(tmp_path, error, where) -> None:
    saver = make_saver(tmp_path, keep=1)
    saver.groups = {"actor": Part(0), "critic": FailingPart(error, where)}
    told: list[int] = []
    saver.on_saved = told.append
    with pytest.raises(type(error)) as raised, saver.ends_saves(lambda: None):
        saver.begin(end_of_step(1))
        saver.poll(wait=True)
        saver.begin(end_of_step(2))
        saver.poll(wait=True)
    assert raised.value is error
    assert (tmp_path / checkpoint_contents.LATEST).read_text() == "1"
    assert checkpoint_folders.saved_steps(tmp_path) == told == [1]
    assert checkpoint_manifest.damage(tmp_path / "global_step_1", ("actor", "critic")) is None
    assert not list(tmp_path.glob("*.incomplete"))


def test_a_save_that_ctrl_c_interrupts_is_made_again_whole(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, keep=1)
    part = FailingPart(KeyboardInterrupt(), "begins")
    saver.groups = {"actor": Part(0), "critic": part}
    with pytest.raises(KeyboardInterrupt), saver.ends_saves(lambda: end_of_step(2)):
        saver.begin(end_of_step(1))
        saver.begin(end_of_step(2))
    assert part.saves == 3
    assert checkpoint_folders.saved_steps(tmp_path) == [2]
    assert checkpoint_manifest.damage(tmp_path / "global_step_2", ("actor", "critic")) is None


def test_a_writer_that_was_asked_and_interrupted_is_asked_again(tmp_path, monkeypatch) -> None:
    writer = CheckpointWriter()
    model_state.save(writer, tmp_path, trained(0), ("model",))

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("workers.model.checkpoint_writer.wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.is_written(wait=True)
    assert writer._written is not None
    assert writer.is_written(wait=True)


def test_what_writes_beside_the_tensors_may_raise_what_it_likes(tmp_path: Path) -> None:
    def write() -> None:
        raise KeyError("a tokenizer's")

    writer = CheckpointWriter()
    writer.start({}, [write])
    with pytest.raises(OSError, match='could not be written: KeyError: "a tokenizer\'s"'):
        writer.is_written(wait=True)


def test_an_optimizer_whose_state_holds_a_list_is_named_as_it_is_saved(tmp_path: Path) -> None:
    module, optimizer, scheduler = trained(0)
    for parameter in module.parameters():
        optimizer.state[parameter] = {"step": torch.zeros(()), "norms": [1.0]}
    with pytest.raises(CannotSave, match=r"AdamW keeps 'norms' of 0\.weight as a list"):
        model_state.save(
            CheckpointWriter(), tmp_path, (module, optimizer, scheduler), ("optimizer",)
        )


class Counting(torch.optim.SGD):
    """Keeps Python numbers of each parameter, as optimisers of users' own do."""

    def step(self, closure=None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["factor"] = state.get("factor", 1.0) * 0.9


def test_numbers_of_an_optimizers_state_are_saved_as_its_tensors_are(tmp_path: Path) -> None:
    """They began anew in a resumed run, without a word."""
    module, _, scheduler = trained(0)
    optimizer = Counting(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        module(torch.ones(1, module[0].in_features)).sum().backward()
        optimizer.step()
    writer = CheckpointWriter()
    model_state.save(writer, tmp_path, (module, optimizer, scheduler), ("optimizer",))
    assert writer.is_written(wait=True)
    other, _, other_scheduler = trained(1)
    read = Counting(other.parameters(), lr=0.1, momentum=0.9)
    model_state.load(tmp_path, (other, read, other_scheduler), ("optimizer",))
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        expected = optimizer.state[ours]
        found = read.state[theirs]
        assert found["count"] == 3 and type(found["count"]) is int
        assert found["factor"] == expected["factor"] and type(found["factor"]) is float
        assert torch.equal(found["momentum_buffer"], expected["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float64, torch.int8])
def test_a_buffer_of_any_dtype_is_read_again(tmp_path: Path, dtype: torch.dtype) -> None:
    """A model with one was saved at each step, and could never be read."""
    module, optimizer, scheduler = trained(0)
    module.register_buffer("kept", torch.ones(3, dtype=dtype))
    writer = CheckpointWriter()
    model_state.save(writer, tmp_path, (module, optimizer, scheduler), ("model",))
    assert writer.is_written(wait=True)
    module.kept.zero_()
    model_state.load(tmp_path, (module, optimizer, scheduler), ("model",))
    assert module.kept.all()


UNREADABLE = {
    "lambda": lambda x: x,
    "array": np.ones(2),
    "float32": np.float32(1),
    "text": np.str_("a"),
    "deque": deque([1.0]),
    "nested": [{"rows": (1, np.ones(1))}],
    "number": 1 << 2001,
    "frozen": frozenset({1}),
    "range": range(3),
    "object": object(),
    "defaultdict": defaultdict(int, a=1),
}


@pytest.mark.parametrize("key", UNREADABLE)
def test_what_could_not_be_read_is_refused_by_owner_key_and_type(key: str) -> None:
    with pytest.raises(CannotSave, match=rf"^the estimator\['{key}'\]") as refused:
        kept_state({key: UNREADABLE[key]}, "the estimator", dicts_only=True)
    assert len(str(refused.value)) < 400


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict = {}
    state["self"] = state
    with pytest.raises(CannotSave, match="holds itself"):
        kept_state(state, "the estimator")


def test_what_is_kept_is_read_again_as_it_was(tmp_path: Path) -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    state = {
        "mean": np.float64(0.1),
        "count": np.int64(3),
        "done": np.bool_(True),
        ("a", 1): [1.0, None, "text", b"x", {2}, (1, 2j)],
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "tensor": torch.ones(2),
        "graph": graph,
        "kinds": [torch.float32, torch.Size((1, 2)), torch.device("cpu")],
    }
    kept = DriverState(global_steps=1, estimator=kept_state(state, "the estimator"))
    state["tensor"].add_(1)
    checkpoint_contents.save_driver_state(tmp_path, kept)
    read = checkpoint_contents.load_driver_state(tmp_path).estimator
    assert torch.equal(read.pop("tensor"), torch.ones(2)), "it is a copy"
    assert torch.equal(read.pop("graph"), graph.detach())
    wanted = {key: value for key, value in state.items() if key not in ("tensor", "graph")}
    assert read == wanted
    assert type(read["mean"]) is float and type(read["count"]) is int and read["done"] is True
    assert type(read["counter"]) is Counter and type(read["ordered"]) is OrderedDict


@pytest.mark.parametrize("entry", ["estimator", "sampler", "suite", "observers"])
def test_no_part_of_the_drivers_state_is_written_that_could_not_be_read(tmp_path, entry) -> None:
    saver = make_saver(tmp_path, keep=1)
    saver.begin(end_of_step(1))
    state = replace(end_of_step(2).state, **{entry: {"history": np.ones(1)}})
    with pytest.raises(CannotSave, match=rf"'{entry}'\['history'\] has array.*, a ndarray"):
        saver.begin(DriverSnapshot(state))
    saver.close()
    assert checkpoint_folders.saved_steps(tmp_path) == [1]
