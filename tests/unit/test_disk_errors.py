"""Errors of the disk are told as what they are, whichever library met them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from data.disk_errors import as_os_errors, limit_reached
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_checkpoint import files_no_longer_than
from training.config import ModelConfig
from workers.model import state as model_state
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.lora import adapter_export, add_adapters


def write_settings(folder: Path) -> None:
    model_state._write_settings(folder, make_model(make_tokenizer()), make_tokenizer())


def write_weights(folder: Path) -> None:
    lm = make_model(make_tokenizer())
    model_state.huggingface_export(folder, lm, make_tokenizer(), weights=True)()


def write_adapters(folder: Path) -> None:
    lm = make_model(make_tokenizer()).requires_grad_(False)
    adapter_export(folder, add_adapters(lm, ModelConfig(lora_rank=8), "model"))()


@pytest.mark.parametrize("write", [write_settings, write_weights, write_adapters])
@pytest.mark.parametrize("size", [0, 1000])
def test_whatever_writes_a_file_without_room_says_so(
    write: Callable[[Path], None], size: int, tmp_path: Path
) -> None:
    with files_no_longer_than(size), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path)
    assert caught.value.errno == errno.EFBIG


def test_a_checkpoint_whose_tokenizer_has_no_room_is_not_written(tmp_path: Path) -> None:
    """The run goes on without: what is raised is an error of the disk, not of tokenizers."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    writer = CheckpointWriter()

    def write_tokenizer() -> None:
        with as_os_errors(tmp_path):
            make_tokenizer().save_pretrained(tmp_path)

    with files_no_longer_than(1000):
        writer.start({}, [write_tokenizer])
        with pytest.raises(OSError, match=r"could not be written: .*File too large"):
            writer.is_written(wait=True)
    assert scheduler.last_epoch == 0


def test_what_cannot_be_tried_for_want_of_room_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with files_no_longer_than(1000):
        model_state.try_settings(make_model(make_tokenizer()), make_tokenizer())
    assert "what checkpoints hold beside tensors is not tried: [Errno 27]" in caplog.text


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no number"), as_os_errors(tmp_path):
        raise ValueError("no number")
    own = OSError(errno.ENOENT, "gone")
    with pytest.raises(FileNotFoundError) as caught, as_os_errors(tmp_path):
        raise own
    assert caught.value is own
    with pytest.raises(OSError, match="No space left") as told, as_os_errors(tmp_path / "a"):
        raise Exception("No space left on device (os error 28)")
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))


def test_a_limit_on_files_is_not_called_a_full_disk() -> None:
    assert limit_reached("[Errno 28] No space left on device") == "is the disk full?"
    assert limit_reached("[Errno 27] File too large") == "is the disk full?"
    with files_no_longer_than(4096):
        assert (
            limit_reached("x: File too large") == "files may have 4,096 bytes here, see ulimit -f"
        )
        assert limit_reached("[Errno 28] No space left on device") == "is the disk full?"
