"""Checkpoint folders: complete or invisible, found, checked, pruned, and no way to run code."""

from __future__ import annotations

import pickle
import re
import resource
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from data.protocol import DataProto
from training.config import OptimConfig, TrainerConfig
from training.run import (
    checkpoint,
    checkpoint_contents,
    checkpoint_folders,
    checkpoint_manifest,
    checkpoint_names,
)
from training.run.checkpoint_contents import CONTENTS, DriverSnapshot, DriverState
from training.run.checkpoint_folders import CannotResume
from training.run.data_position import DataPosition
from training.run.step_source import GeneratedStep
from workers.model import state as model_state
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.state import CheckpointWriter

# A run's workers silence it: a single rank saves by itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(run_dir: Path, step: int, parts: tuple[str, ...] = ("actor", "critic")) -> None:
    folder = checkpoint_names.start_checkpoint(run_dir, step)
    for part in parts:
        (folder / part).mkdir()
        (folder / part / "weights").write_text(str(step))
    checkpoint_contents.save_driver_state(folder, DriverState(global_steps=step, kl_coef=0.5))
    checkpoint_names.complete_checkpoint(folder)


def test_a_checkpoint_is_seen_only_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = checkpoint_names.start_checkpoint(tmp_path, 2)
    (folder / "actor").mkdir()
    assert checkpoint_folders.saved_steps(tmp_path) == [1]
    assert checkpoint_names.complete_checkpoint(folder) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "global_step_1",
        "global_step_2",
        checkpoint_contents.LATEST,
        checkpoint_contents.SAVED_STEPS,
    ]
    assert (tmp_path / checkpoint_contents.LATEST).read_text() == "2"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 3, parts=("actor",))
    assert not (tmp_path / "global_step_3/critic").exists()


def test_resume_takes_the_latest_that_holds_what_is_needed(tmp_path: Path) -> None:
    # It belongs to an abandoned run.
    write(tmp_path, 20)
    write(tmp_path, 9)
    write(tmp_path, 10, parts=("actor",))
    (tmp_path / "global_step_11.incomplete").mkdir()
    find = checkpoint_folders.find_checkpoint
    assert find(tmp_path, "auto", None, ("actor",)) == tmp_path / "global_step_10"
    with pytest.raises(CannotResume, match="global_step_10 holds no critic") as refused:
        find(tmp_path, "auto", None, ("actor", "critic"))
    assert "resume_with_changes=true" in str(refused.value)
    assert f"resume_from_path={tmp_path}/global_step_9 gives" in str(refused.value)
    assert find(tmp_path, "disable", None) is None
    assert find(tmp_path / "empty", "auto", None) is None
    assert (
        find(tmp_path, "resume_path", str(tmp_path / "global_step_9")) == tmp_path / "global_step_9"
    )
    with pytest.raises(FileNotFoundError, match="holds no critic"):
        find(tmp_path, "resume_path", str(tmp_path / "global_step_10"), ("actor", "critic"))


def test_a_damaged_checkpoint_is_left_out_and_one_without_a_part_refused(tmp_path: Path) -> None:
    needs = ("actor", "critic")
    write(tmp_path, 1)
    write(tmp_path, 2, parts=("actor",))
    write(tmp_path, 3)
    (tmp_path / "global_step_3/critic/weights").write_text("other")
    with pytest.raises(CannotResume, match="global_step_2 holds no critic"):
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, needs)
    # Damaged, whatever it was saved with.
    (tmp_path / "global_step_2/actor/weights").write_text("other")
    found = checkpoint_folders.find_checkpoint(tmp_path, "auto", None, needs)
    assert found == tmp_path / "global_step_1"
    # A run without a critic needs none.
    write(tmp_path, 4, parts=("actor",))
    found = checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))
    assert found == tmp_path / "global_step_4"


@pytest.mark.parametrize("latest", [None, "40"])
def test_a_folder_with_another_steps_name_is_refused(tmp_path: Path, latest: str | None) -> None:
    write(tmp_path, 3)
    write(tmp_path, 4)
    renamed = (tmp_path / "global_step_4").rename(tmp_path / "global_step_40")
    (tmp_path / checkpoint_contents.LATEST).unlink()
    (tmp_path / checkpoint_contents.SAVED_STEPS).unlink()
    if latest is not None:
        (tmp_path / checkpoint_contents.LATEST).write_text(latest)
    find = checkpoint_folders.find_checkpoint
    for mode, path in (("auto", None), ("resume_path", str(renamed))):
        with pytest.raises(CannotResume, match=r"_40 holds the checkpoint of step 4, .* again"):
            find(tmp_path, mode, path, ("actor",))
    # Other names say nothing of a step.
    best = renamed.rename(tmp_path / "best")
    assert find(tmp_path, "resume_path", str(best), ("actor",)) == best


def test_a_state_that_is_not_read_is_to_be_mended_by_the_user(tmp_path: Path) -> None:
    """It is of a version that wrote whatever an estimator kept."""
    folder = checkpoint_names.start_checkpoint(tmp_path, 1)
    (folder / "actor").mkdir()
    (folder / "actor/weights").write_text("1")
    torch.save({"global_steps": 1, "estimator": {"rows": deque()}}, folder / "data.pt")
    checkpoint_names.complete_checkpoint(folder)
    with pytest.raises(CannotResume, match=r"data\.pt is not read: .* starts anew"):
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))


def test_pruning_keeps_the_newest_and_clears_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / "global_step_4.incomplete").mkdir()
    checkpoint_folders.prune(tmp_path, 10, keep_actor=3, keep_critic=1)
    assert checkpoint_folders.saved_steps(tmp_path) == [2, 3, 10]
    assert checkpoint_folders.saved_steps(tmp_path, ("critic",)) == [10]
    assert not list(tmp_path.rglob("*.incomplete"))
    checkpoint_folders.prune(tmp_path, 10, keep_actor=None, keep_critic=None)
    assert checkpoint_folders.saved_steps(tmp_path) == [2, 3, 10]


def test_pruning_never_takes_what_was_just_saved_for_an_older_runs_later_step(
    tmp_path: Path,
) -> None:
    write(tmp_path, 6)
    write(tmp_path, 1)
    checkpoint_folders.prune(tmp_path, 1, keep_actor=1, keep_critic=1)
    write(tmp_path, 2)
    checkpoint_folders.prune(tmp_path, 2, keep_actor=1, keep_critic=1)
    assert checkpoint_folders.saved_steps(tmp_path) == [2, 6]
    assert (
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))
        == tmp_path / "global_step_2"
    )


def test_a_folder_whose_checkpoints_do_not_fit_is_an_error_not_a_fresh_start(
    tmp_path: Path,
) -> None:
    write(tmp_path, 3, parts=("actor",))
    with pytest.raises(FileNotFoundError, match="none with actor, critic as this run needs"):
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor", "critic"))


def test_driver_state_runs_no_code(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "hacked",))

    torch.save({"global_steps": Payload()}, tmp_path / "data.pt")
    with pytest.raises(Exception, match="which could run code"):
        checkpoint_contents.load_driver_state(tmp_path)
    assert not (tmp_path / "hacked").exists()


def trained(
    seed: int,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    optim = OptimConfig(lr=0.1, scheduler="cosine")
    optimizer = build_optimizer(module, optim)
    return module, optimizer, build_scheduler(optimizer, optim, 10)


def step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    module(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


State = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def save(folder: Path, state: State, parts: tuple[str, ...]) -> None:
    writer = CheckpointWriter()
    model_state.save(writer, folder, state, parts)
    assert writer.is_written(wait=True)


class Part:
    """Plays a worker group of one small model."""

    def __init__(self, seed: int) -> None:
        self.state = trained(seed)
        self.writer = CheckpointWriter()

    def save_checkpoint(self, folder: str) -> None:
        model_state.save(self.writer, Path(folder), self.state, ("model", "optimizer", "extra"))

    def checkpoint_written(self, wait: bool) -> bool:
        return self.writer.is_written(wait)


def make_saver(run_dir: Path, keep: int | None = None) -> checkpoint.CheckpointSaver:
    config = TrainerConfig(save_freq=1, max_actor_ckpt_to_keep=keep, max_critic_ckpt_to_keep=keep)
    return checkpoint.CheckpointSaver(run_dir, {"actor": Part(0), "critic": Part(1)}, config)


def end_of_step(step: int) -> DriverSnapshot:
    return DriverSnapshot(DriverState(global_steps=step))


def test_a_checkpoint_holds_the_files_that_are_listed_and_no_others(tmp_path: Path) -> None:
    generated: Future[GeneratedStep] = Future()
    batch = DataProto.from_dict(tensors={"x": torch.arange(2)})
    generated.set_result(GeneratedStep(batch, {"drawn": 1.0}, DataPosition(2, 8)))
    saver = make_saver(tmp_path)
    saver.begin(DriverSnapshot(DriverState(global_steps=1), (generated, Future())))
    saver.close()
    folder = tmp_path / "global_step_1"
    files = [path for path in folder.rglob("*") if path.is_file()]
    held = {
        entry.path
        for path in files
        for entry in CONTENTS
        if path.relative_to(folder).is_relative_to(entry.path)
    }
    of_models = {"model", "optimizer", "scheduler.json"}
    assert held == {
        *(f"{model}/{name}" for model in ("actor", "critic") for name in of_models),
        *("data.pt", "in_flight", "manifest.json"),
    }
    listed = [entry.path for entry in CONTENTS]
    assert all(
        any(path.relative_to(folder).is_relative_to(name) for name in listed) for path in files
    )
    # The second step was still being generated.
    (restored,) = checkpoint_contents.load_in_flight(folder)
    assert restored.metrics == {"drawn": 1.0} and restored.position == DataPosition(2, 8)
    assert torch.equal(restored.batch.batch["x"], batch.batch["x"])


def test_an_older_checkpoint_goes_on_without_the_entries_that_it_lacks(tmp_path: Path) -> None:
    entries = {"global_steps": 3, "epoch": 1, "rows_done": 16, "kl_coef": 0.5, "long_gone": [1]}
    torch.save(entries, tmp_path / "data.pt")
    state = checkpoint_contents.load_driver_state(tmp_path)
    assert state == DriverState(global_steps=3, epoch=1, rows_done=16, kl_coef=0.5)
    assert state.position == DataPosition(1, 16)


def test_what_is_written_is_the_state_at_the_start_though_training_goes_on(tmp_path: Path) -> None:
    state, writer = trained(0), CheckpointWriter()
    step(*state)
    weights = [parameter.detach().clone() for parameter in state[0].parameters()]
    model_state.save(writer, tmp_path, state, ("model", "optimizer", "extra"))
    writer.wait_until_copied()
    for _ in range(5):
        step(*state)
    assert writer.is_written(wait=True)
    restored = trained(1)
    model_state.load(tmp_path, restored, ("model", "optimizer", "extra"))
    assert all(torch.equal(a, b) for a, b in zip(weights, restored[0].parameters(), strict=True))
    assert restored[2].last_epoch == 1


def test_checkpoints_appear_in_the_background_one_at_a_time_and_prune_the_old(
    tmp_path: Path,
) -> None:
    saver = make_saver(tmp_path, keep=2)
    for number in range(1, 5):
        saver.begin(end_of_step(number))
        assert number not in checkpoint_folders.saved_steps(tmp_path)
        assert checkpoint_folders.saved_steps(tmp_path)[-1:] == ([number - 1] if number > 1 else [])
    deadline = time.monotonic() + 20
    while 4 not in checkpoint_folders.saved_steps(tmp_path) and time.monotonic() < deadline:
        saver.poll()
        time.sleep(0.01)
    saver.close()
    assert checkpoint_folders.saved_steps(tmp_path) == [3, 4]
    assert (
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor", "critic"))
        == tmp_path / "global_step_4"
    )


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Lets this process write no more to a file of that size in bytes, as on a full disk.

    It is over before the test is, since pytest may write to one.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 2000, 4000])
def test_a_full_disk_costs_the_one_checkpoint(tmp_path: Path, caplog, size: int) -> None:
    """Lacks room for the driver's state, the metadata or the weights.

    The older checkpoint stays, a later one is saved.
    """
    saver = make_saver(tmp_path)
    saver.begin(end_of_step(1))
    saver.poll(wait=True)
    with files_no_longer_than(size):
        saver.begin(end_of_step(2))
        saver.poll(wait=True)
    assert "the run goes on without" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_1",
        checkpoint_contents.LATEST,
        checkpoint_contents.SAVED_STEPS,
    ]
    assert checkpoint_manifest.damage(tmp_path / "global_step_1") is None
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"the last checkpoint, of step 2, was not saved .* keeps the",
    ) as e:
        saver.close()
    assert f"{tmp_path} keeps the one of step 1: " in str(e.value)
    saver.begin(end_of_step(3))
    saver.close()
    assert checkpoint_folders.saved_steps(tmp_path) == [1, 3]


def test_a_full_disk_from_the_start_is_said_in_one_line_that_names_no_older_checkpoint(
    tmp_path: Path,
) -> None:
    saver = make_saver(tmp_path)
    lost = pytest.raises(
        checkpoint.CheckpointError, match=r"step 1, was not saved .* holds no other: \S"
    )
    with files_no_longer_than(0), lost as error:
        saver.begin(end_of_step(1))
        saver.close()
    assert "\n" not in str(error.value)


def test_a_device_without_space_is_reported_with_its_rank_and_cause(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/__0_0.distcp").symlink_to("/dev/full")
    writer = CheckpointWriter()
    model_state.save(writer, tmp_path, trained(0), ("model",))
    with pytest.raises(OSError, match=r"rank 0: .*No space left"):
        writer.is_written(wait=True)


def test_training_goes_on_from_a_saved_state_bitwise(tmp_path: Path) -> None:
    parts = ("model", "optimizer", "extra")
    original = trained(0)
    for _ in range(3):
        step(*original)
    save(tmp_path, original, parts)
    restored = trained(1)
    model_state.load(tmp_path, restored, parts)
    for _ in range(3):
        step(*original)
        step(*restored)
    assert original[1].param_groups[0]["lr"] == restored[1].param_groups[0]["lr"]
    for a, b in zip(original[0].parameters(), restored[0].parameters(), strict=True):
        assert torch.equal(a, b)


def with_an_unused_part(seed: int) -> State:
    """Makes a model of which a part gets its first gradient in the fourth step."""
    torch.manual_seed(seed)
    module = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    module.forward = lambda x: sum(part(x) for part in module[: module.used])
    module.used = 1
    optim = OptimConfig(lr=0.1)
    optimizer = build_optimizer(module, optim)
    return module, optimizer, build_scheduler(optimizer, optim, 10)


@pytest.mark.parametrize("used_before", [False, True])
def test_a_part_without_a_gradient_so_far_goes_on_from_a_checkpoint_too(
    tmp_path: Path, used_before: bool
) -> None:
    parts = ("model", "optimizer", "extra")
    original = with_an_unused_part(0)
    restored = with_an_unused_part(1)
    unsaved = with_an_unused_part(0)
    for _ in range(3):
        step(*original)
        step(*unsaved)
    if used_before:
        step(*restored)
    save(tmp_path, original, parts)
    model_state.load(tmp_path, restored, parts)
    for module, *others in (original, restored, unsaved):
        module.used = 2
        for _ in range(2):
            step(module, *others)
    for other in (restored, unsaved):
        for a, b in zip(original[0].parameters(), other[0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_saving_before_the_first_step_changes_no_step_after_it_nor_after_loading(
    tmp_path: Path,
) -> None:
    """An optimiser has no state then.

    A state of zeros would be another: AdamW counts the steps in it.
    """
    parts = ("model", "optimizer", "extra")
    plain, saved, fresh, used = trained(0), trained(0), trained(1), trained(2)
    step(*used)
    save(tmp_path, saved, parts)
    for state in (fresh, used):
        model_state.load(tmp_path, state, parts)
    assert [dict(state[1].state) for state in (saved, fresh, used)] == [{}] * 3
    for state in (plain, saved, fresh, used):
        step(*state)
    for state in (saved, fresh, used):
        assert all(
            torch.equal(a, b)
            for a, b in zip(plain[0].parameters(), state[0].parameters(), strict=True)
        )


def test_a_single_rank_saves_and_loads_alone_beside_an_engines_process_group(
    tmp_path: Path,
) -> None:
    """vLLM makes one in the process, even for one rank.

    It is not ours, and goes when the engine goes.
    """
    if torch.distributed.is_initialized():
        # An engine of an earlier test in this process left its own.
        torch.distributed.destroy_process_group()
    parts = ("model", "optimizer", "extra")
    for engine in ("gone", "there"):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            state, writer = trained(0), CheckpointWriter()
            step(*state)
            if engine == "gone":
                torch.distributed.destroy_process_group()
            model_state.save(writer, tmp_path / engine, state, parts)
            assert writer.is_written(wait=True)
            restored = trained(1)
            model_state.load(tmp_path / engine, restored, parts)
            assert torch.equal(restored[0][0].weight, state[0][0].weight)
            if engine == "there":
                # How many collectives there were.
                assert torch.distributed.group.WORLD._get_sequence_number_for_group() == 0
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def test_a_damaged_checkpoint_is_left_out_and_the_one_before_taken(tmp_path: Path, caplog) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "global_step_3/actor/weights").write_text("4")
    (tmp_path / "global_step_2/critic/weights").unlink()
    assert (
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))
        == tmp_path / "global_step_1"
    )
    assert (
        "global_step_3 is damaged (actor/weights has changed since it was written)" in caplog.text
    )
    assert re.search(r"global_step_2 is damaged \(.* No such file .*critic/weights", caplog.text)
    with pytest.raises(ValueError, match="global_step_3 is damaged: actor/weights"):
        checkpoint_folders.find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_3"))
    (tmp_path / "global_step_1" / checkpoint_contents.MANIFEST).write_text("{")
    with pytest.raises(FileNotFoundError, match=r"every checkpoint in .* is damaged"):
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("[]", "'list' object has no attribute 'items'"),
        ("null", "'NoneType' object has no attribute 'items'"),
        ("{}", "manifest.json lists no data.pt, actor"),
        ('{"data.pt": [0, 0]}', "manifest.json lists no actor"),
        ('{"actor/weights": [1, 0]}', "manifest.json lists no data.pt"),
        ('{"actor/weights": 7, "data.pt": null}', "actor/weights has changed since it was written"),
    ],
)
def test_a_manifest_that_does_not_list_the_files_is_damage(
    tmp_path: Path, caplog, manifest: str, problem: str
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "global_step_2" / checkpoint_contents.MANIFEST).write_text(manifest)
    assert (
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))
        == tmp_path / "global_step_1"
    )
    assert f"global_step_2 is damaged ({problem}) and left out" in caplog.text
    with pytest.raises(ValueError, match="global_step_2 is damaged"):
        checkpoint_folders.find_checkpoint(
            tmp_path, "resume_path", str(tmp_path / "global_step_2"), ("actor",)
        )


def test_a_checkpoint_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "global_step_1" / checkpoint_contents.MANIFEST).unlink()
    assert "manifest.json" in str(checkpoint_manifest.damage(tmp_path / "global_step_1"))


def test_a_checkpoint_whose_driver_state_is_gone_is_damaged_too(tmp_path: Path, caplog) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "global_step_2/data.pt").unlink()
    assert (
        checkpoint_folders.find_checkpoint(tmp_path, "auto", None, ("actor",))
        == tmp_path / "global_step_1"
    )
    assert re.search(r"global_step_2 is damaged \(.* No such file .*data.pt", caplog.text)


class Payload:
    """Runs code when it is unpickled the ordinary way."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.trace,))


def test_a_malicious_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """Puts code into the metadata's pickle, and into an entry that claims to be no tensor."""
    state, trace = trained(0), tmp_path / "hacked"
    save(tmp_path, state, ("model",))
    whole = (tmp_path / "model/.metadata").read_bytes()
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(
        pickle.UnpicklingError,
        match=r"names pathlib\.\w*Path\.touch|names builtins.getattr|no reason",
    ):
        model_state.load(tmp_path, state, ("model",))
    metadata = pickle.loads(whole)
    metadata.state_dict_metadata["0.weight"] = BytesStorageMetadata()
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError):
        model_state.load(tmp_path, state, ("model",))
    assert not trace.exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, trained(0), ("model",))
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    optimizer = build_optimizer(module, OptimConfig())
    with pytest.raises(ValueError, match="saved by another model: 3 tensors differ"):
        model_state.load(
            tmp_path, (module, optimizer, build_scheduler(optimizer, OptimConfig(), 1)), ("model",)
        )


def test_a_part_that_was_not_saved_is_named(tmp_path: Path) -> None:
    state = trained(0)
    save(tmp_path, state, ("model",))
    model_state.load(tmp_path, state, ("model",))
    with pytest.raises(FileNotFoundError, match=r"holds no .optimizer.*load_contents"):
        model_state.load(tmp_path, state, ("model", "optimizer"))


def test_without_a_frequency_a_crash_costs_at_most_ten_minutes_and_two_checkpoints_stay(
    tmp_path, monkeypatch
) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    saver = checkpoint.CheckpointSaver(tmp_path, {}, TrainerConfig())
    saved = []
    for step in range(1, 31):
        now += 70.0
        if saver.is_due(step, last=30, step_s=70.0):
            saver.begin(end_of_step(step))
            saved.append(step)
    saver.close()
    assert saved == [8, 16, 24, 30], "a ninth step of 70 s would end after 630 s"
    assert checkpoint_folders.saved_steps(tmp_path) == [24, 30]
    never = checkpoint.CheckpointSaver(tmp_path, {}, TrainerConfig(save_freq=-1))
    assert not never.is_due(30, last=30, step_s=700.0)
