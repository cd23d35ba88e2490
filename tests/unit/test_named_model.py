"""What a person names as a model is told apart once, for --eval, --chat and the export."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.run import named_model
from training.run.checkpoint_contents import ACTOR, DRIVER_STATE, LATEST, MANIFEST
from training.run.checkpoint_manifest import write_manifest
from training.run.model_source import find_checkpoint_model, tokenizer_folder
from training.run.named_model import CannotUse, find_named_model, is_hub_name


def write_checkpoint(folder: Path) -> Path:
    """Writes the files of a checkpoint, of which none is read here."""
    huggingface = folder / ACTOR / "huggingface"
    for place in (folder / ACTOR / "model", huggingface, folder / "critic"):
        place.mkdir(parents=True)
        (place / "content").write_text(folder.name)
    (huggingface / "config.json").write_text("{}")
    (folder / DRIVER_STATE).write_text("")
    write_manifest(folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that saved steps 2 and 4; step 6 is of an abandoned one."""
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / f"run/global_step_{step}")
    (tmp_path / "run" / LATEST).write_text("4")
    return tmp_path / "run"


def test_a_run_and_all_parts_of_a_policy_name_a_checkpoint(run_dir: Path) -> None:
    latest = run_dir / "global_step_4"
    for place in (run_dir, latest, *(latest / ACTOR / part for part in ("", "model"))):
        found = find_named_model(str(place))
        assert (found.kind, found.path) == ("checkpoint", str(latest)), place
    # Its config has no weights beside it, but a tokenizer.
    assert find_named_model(f"{latest}/actor/huggingface").kind == "checkpoint"
    assert tokenizer_folder(f"{latest}/actor/huggingface") == f"{latest}/actor/huggingface"
    assert tokenizer_folder(str(run_dir)) == f"{latest}/actor/huggingface"
    saved_elsewhere = write_checkpoint(run_dir.parent / "last")
    assert find_named_model(str(saved_elsewhere)).path == str(saved_elsewhere)


def test_weights_in_a_checkpoint_are_a_model_and_its_export_is_the_checkpoints(
    run_dir: Path,
) -> None:
    checkpoint = run_dir / "global_step_2"
    place = checkpoint / ACTOR / "huggingface"
    (place / "model.safetensors").write_text("")
    assert find_named_model(str(place)).kind == "folder"
    assert find_checkpoint_model(place).checkpoint == checkpoint
    (checkpoint / ACTOR / "model/content").write_text("other")
    with pytest.raises(CannotUse, match="is damaged: actor/model/content has changed"):
        find_checkpoint_model(place)


def test_a_damaged_or_half_checkpoint_of_a_run_is_left_out(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "global_step_4" / MANIFEST).unlink()
    assert find_named_model(str(run_dir)).path == str(run_dir / "global_step_2")
    assert "global_step_4 is half a checkpoint" in caplog.text
    (run_dir / "global_step_2/data.pt").write_text("changed")
    with pytest.raises(CannotUse, match=r"no sound checkpoint: global_step_4 .*; global_step_2 "):
        find_named_model(str(run_dir))


def test_a_run_whose_latest_is_gone_gives_no_other_without_a_word(run_dir: Path) -> None:
    (run_dir / LATEST).write_text("5")
    with pytest.raises(CannotUse, match=r"names step 5, which is not there; .*: 2, 4, 6"):
        find_named_model(str(run_dir))


def test_the_critic_is_refused(run_dir: Path) -> None:
    with pytest.raises(CannotUse, match="is the critic"):
        find_named_model(f"{run_dir}/global_step_2/critic")


def test_a_folder_that_was_only_named_like_a_checkpoint_is_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_9"
    folder.mkdir()
    with pytest.raises(CannotUse, match="half a checkpoint"):
        find_named_model(str(folder))
    for name in ("config.json", "model.safetensors", MANIFEST):
        (folder / name).write_text("{}")
    found = find_named_model(str(folder))
    assert (found.kind, found.checkpoint) == ("folder", None)


def test_names_of_the_hub_are_told_from_misspelt_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/policy").mkdir(parents=True)
    monkeypatch.setattr(named_model, "hub_refusal", lambda name: None)
    assert find_named_model("org/policy").kind == "hub"
    assert is_hub_name("gpt2") and not is_hub_name("models/polic")
    # Where runs are written to, though no such folder is there yet.
    assert not is_hub_name("outputs/nope") and not is_hub_name("checkpoints/nope")
    with pytest.raises(CannotUse, match="there is no outputs/nope"):
        find_named_model("outputs/nope")
    with pytest.raises(CannotUse, match="did you mean 'models/policy'"):
        find_named_model("models/polic")
    with pytest.raises(CannotUse, match="is no folder; give a run's folder"):
        find_checkpoint_model("org/policy")
    monkeypatch.setattr(named_model, "hub_refusal", lambda name: "no connection")
    with pytest.raises(CannotUse, match=r"polic is not a folder .* the hub \(no connection\)"):
        find_named_model("polic")
