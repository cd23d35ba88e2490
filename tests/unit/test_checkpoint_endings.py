"""The save under way when a run ends, by an error or a signal: it comes to its end."""

from __future__ import annotations

import time

import pytest
import torch

from tests.unit.test_checkpoint import Part, end_of_step, files_no_longer_than, make_saver
from training.run import checkpoint, checkpoint_folders
from workers.model.checkpoint_writer import CheckpointWriter

# A run's workers silence it: a single rank saves by itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class SlowPart(Part):
    """Writes for a while, as a large model does; a rank of it may answer no more."""

    answers = True

    def checkpoint_written(self, wait: bool) -> bool:
        if not wait:
            return False
        time.sleep(0.3 if self.answers else 5)
        return self.writer.is_written(wait)


class RayError(Exception):
    """Comes of a rank."""

    __module__ = "ray.exceptions"


@pytest.mark.parametrize("error", [ValueError("alarm"), RayError("rank 1"), SystemExit(3)])
def test_an_error_waits_for_the_save_under_way_and_stays_what_is_raised(tmp_path, error) -> None:
    saver = make_saver(tmp_path)
    saver.groups = {"actor": SlowPart(0)}
    with pytest.raises(type(error)) as raised, saver.ends_saves(lambda: end_of_step(9)):
        saver.begin(end_of_step(1))
        raise error
    assert raised.value is error
    assert checkpoint_folders.saved_steps(tmp_path) == [1]


@pytest.mark.seconds
@pytest.mark.parametrize(("in_step", "saved"), [(True, [1]), (False, [1, 2])])
def test_an_interrupted_run_ends_its_save_and_saves_a_whole_step(tmp_path, in_step, saved) -> None:
    saver = make_saver(tmp_path)
    saver.groups = {"actor": SlowPart(0)}
    last = None if in_step else end_of_step(2)
    with pytest.raises(KeyboardInterrupt), saver.ends_saves(lambda: last):
        saver.begin(end_of_step(1))
        raise KeyboardInterrupt
    assert checkpoint_folders.saved_steps(tmp_path) == saved


def test_a_save_that_fails_after_an_error_is_logged_beside_it(tmp_path, caplog) -> None:
    saver = make_saver(tmp_path)
    with pytest.raises(ValueError, match="alarm"), saver.ends_saves(lambda: None):
        saver.begin(end_of_step(1))
        saver.poll(wait=True)
        with files_no_longer_than(2000):
            saver.begin(end_of_step(2))
            # Not asked for: what asks raises.
            for part in saver.groups.values():
                assert part.writer._written.exception(timeout=30) is not None
        raise ValueError("alarm")
    assert "no checkpoint of step 2" in caplog.text
    assert checkpoint_folders.saved_steps(tmp_path) == [1]


def test_ranks_that_answer_no_more_are_not_waited_for_without_end(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(checkpoint, "FAILED_RANK_WAIT_S", 0.3)
    saver, part = make_saver(tmp_path), SlowPart(0)
    part.answers = False
    saver.groups = {"actor": part}
    began = time.monotonic()
    with pytest.raises(RayError), saver.ends_saves(lambda: None):
        saver.begin(end_of_step(1))
        raise RayError("rank 0 died")
    assert time.monotonic() - began < 3
    assert "the ranks have not answered for 0.3 s" in caplog.text


def test_a_disk_that_is_full_is_told_in_place_of_what_fails_behind_it(tmp_path, caplog) -> None:
    """The archive's writer then raises `unexpected pos 704 vs 598`."""
    writer = CheckpointWriter()
    tensors = {tmp_path / "model": {"weight": torch.zeros(100_000)}}
    (tmp_path / "model").mkdir()
    with files_no_longer_than(2000), pytest.raises(OSError, match="could not be") as raised:
        writer.start(tensors, [])
        writer.is_written(wait=True)
    assert "File too large" in str(raised.value) and "unexpected pos" not in str(raised.value)
