"""Exports of checkpoints: the policy's very weights, a card, and a sentence where it cannot be."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from features.export import export, exported_model
from features.export.model_card import OF_THE_MACHINE
from training.config import ModelConfig, OptimConfig
from training.config.reference import to_yaml
from training.config.schema.ppo import PPOConfig
from training.run import checkpoint_names, model_source, named_model
from training.run.checkpoint_contents import DriverState, save_driver_state
from training.run.metrics_file import read_records
from training.run.named_model import CannotUse
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel, PolicyValueModel

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IDS = torch.tensor([[1, 5, 8, 16, 9, 20, 2, 1, 6]])
STEP = 3
KINDS = ("plain", "tied", "shared", "lora", "shared-lora")


def logits(lm: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return lm.eval()(IDS).logits


def write_run(run_dir: Path, model: Path, kind: str = "plain", **contents: Any) -> torch.Tensor:
    """Saves a checkpoint of a policy that has moved; returns the policy's logits of IDS."""
    is_lora = "lora" in kind
    settings = ModelConfig(
        path=str(model),
        dtype=contents.get("dtype", "float32"),
        lora_rank=4 if is_lora else 0,
        lora_alpha=24,
    )
    spec = ModelSpec(settings, str(model), torch.device("cpu"))
    lm = spec.causal_lm(trainable=True)
    policy = PolicyModel(PolicyValueModel(lm) if "shared" in kind else lm)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    trained = policy if "shared" in kind else policy.lm
    optimizer = build_optimizer(trained, OptimConfig())
    state = (trained, optimizer, build_scheduler(optimizer, OptimConfig(), 5))
    writer = CheckpointWriter()
    folder = checkpoint_names.start_checkpoint(run_dir, STEP)
    parts = contents.get("parts", ("model", "optimizer", "extra"))
    model_state.save(writer, folder / "actor", state, parts, spec.tokenizer)
    assert writer.is_written(wait=True)
    save_driver_state(folder, DriverState(global_steps=STEP))
    checkpoint_names.complete_checkpoint(folder)
    config = PPOConfig()
    policy_config = replace(config.actor_rollout_ref, model=settings)
    policy_config = replace(policy_config, rollout=replace(policy_config.rollout, dtype="float32"))
    config = replace(config, actor_rollout_ref=policy_config)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return logits(lm)


@pytest.fixture(scope="module")
def run_of(
    tiny_task: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Makes a run of a kind once; returns its folder and the policy's logits."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def run_of(kind: str) -> tuple[Path, torch.Tensor]:
        if kind not in made:
            run_dir = tmp_path_factory.mktemp(kind)
            model = tied_model if kind == "tied" else tiny_task / "model"
            made[kind] = (run_dir, write_run(run_dir, model, kind))
        return made[kind]

    return run_of


@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_the_policy_does(
    tmp_path: Path, run_of: Callable[[str], tuple[Path, torch.Tensor]], kind: str
) -> None:
    if "lora" in kind:
        pytest.importorskip("peft")
    run_dir, expected = run_of(kind)
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template and (tmp_path / "out/generation_config.json").exists()
    assert [path for path in tmp_path.iterdir() if path.name != "out"] == []


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_bitwise_those_that_a_run_writes_with_hf_model(
    tmp_path: Path, tiny_task: Path, kind: str, dtype: str
) -> None:
    """Which is what engines were sent, cast to their type."""
    if "lora" in kind:
        pytest.importorskip("peft")
    write_run(tmp_path / "run", tiny_task / "model", kind, parts=("model", "hf_model"), dtype=dtype)
    export.export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    written = load_file(tmp_path / f"run/global_step_{STEP}/actor/huggingface/model.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.to(torch.bfloat16), written[name]), name


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["lora", "shared-lora"])
def test_peft_loads_the_adapters_alone(
    tmp_path: Path, run_of: Callable[[str], tuple[Path, torch.Tensor]], kind: str
) -> None:
    peft = pytest.importorskip("peft")
    run_dir, expected = run_of(kind)
    assert export.main([str(run_dir), str(tmp_path / "out"), "--adapter"]) == 0
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(model), expected)
    assert not list((tmp_path / "out").glob("model*.safetensors"))


def test_many_small_shards_hold_the_same_model(
    tmp_path: Path,
    run_of: Callable[[str], tuple[Path, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, expected = run_of("plain")
    monkeypatch.setattr(exported_model, "SHARD_BYTES", 40_000)
    monkeypatch.setattr("training.run.checkpoint_weights.READ_BYTES", 20_000)
    export.export(run_dir, tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 3 and set(index["weight_map"].values()) == files
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.seconds
def test_a_base_model_that_moved_is_asked_for_and_another_is_refused(
    tmp_path: Path, tiny_task: Path, tied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    base = tmp_path / "base"
    shutil.copytree(tiny_task / "model", base)
    expected = write_run(tmp_path / "run", base, "lora")
    base.rename(tmp_path / "moved")
    argv = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert export.main(argv) == 2
    assert "--base FOLDER names where it lies now" in capsys.readouterr().err
    assert export.main([*argv, "--adapter"]) == 0, "adapters need no base"
    shutil.rmtree(tmp_path / "out")
    assert export.main([*argv, "--base", str(tmp_path / "moved")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    config = json.loads((tied_model / "config.json").read_text())
    config |= {"hidden_size": 32, "head_dim": 8}
    other = AutoModelForCausalLM.from_config(type(model.config).from_dict(config))
    other.save_pretrained(tmp_path / "other")
    shutil.rmtree(tmp_path / "out")
    assert export.main([*argv, "--base", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "run/config.yaml").unlink()
    assert export.main(argv) == 2
    assert "lora_alpha are in the run's config.yaml" in capsys.readouterr().err


@pytest.fixture
def copied_run(tmp_path: Path, run_of: Callable[[str], tuple[Path, torch.Tensor]]) -> Path:
    """A run that a test may damage."""
    return Path(shutil.copytree(run_of("plain")[0], tmp_path / "run"))


def remanifest(run_dir: Path) -> Path:
    """Makes the manifest fit what a hand has changed; returns the checkpoint."""
    checkpoint = run_dir / f"global_step_{STEP}"
    (checkpoint / "manifest.json").unlink()
    from training.run.checkpoint_manifest import write_manifest

    write_manifest(checkpoint)
    return checkpoint


def damage_bytes(run: Path) -> None:
    file = next(run.glob("global_step_*/actor/model/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def plant_code(run: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (run / "ran",))

    metadata = run / f"global_step_{STEP}/actor/model/.metadata"
    metadata.write_bytes(pickle.dumps(Runs()))
    remanifest(run)


def swap_model(run: Path) -> None:
    file = run / f"global_step_{STEP}/actor/huggingface/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    remanifest(run)


def name_own_code(run: Path) -> None:
    folder = run / f"global_step_{STEP}/actor/huggingface"
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "mine.py").write_text("open('ran', 'w')")
    remanifest(run)


def cut_short(run: Path) -> None:
    for file in run.glob("global_step_*/actor/model/*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    remanifest(run)


def forget_tokenizer(run: Path) -> None:
    next(run.glob("global_step_*/actor/huggingface/tokenizer_config.json")).unlink()
    remanifest(run)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bytes": (damage_bytes, "has changed since it was written"),
    "code in a pickle": (plant_code, "is no list of tensors"),
    "another model": (swap_model, "describes: 9 differ"),
    "code of its own": (name_own_code, "describes no known model"),
    "cut short": (cut_short, "cannot be read"),
    "no tokenizer": (forget_tokenizer, "holds no tokenizer_config.json"),
    "no manifest": (
        lambda run: (run / f"global_step_{STEP}/manifest.json").unlink(),
        "was not written to its end",
    ),
    "no weights": (
        lambda run: [
            shutil.rmtree(run / f"global_step_{STEP}/actor/model"),
            remanifest(run),
        ],
        "neither 'model' nor 'hf_model'",
    ),
    "no policy": (
        lambda run: shutil.rmtree(run / f"global_step_{STEP}/actor"),
        "holds no actor folder",
    ),
    "latest is gone": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("7"),
        "names step 7, which is not there",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_not_whole_or_not_ours_is_refused_in_a_sentence(
    tmp_path: Path, copied_run: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    spoil, sentence = DAMAGES[kind]
    spoil(copied_run)
    assert export.main([str(copied_run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert sentence in said, said
    assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "nothing is left behind"
    assert not list(copied_run.rglob("ran")) and not Path("ran").exists(), "no code was run"


def test_an_exported_folder_names_no_code_that_it_has_not(copied_run: Path, tmp_path: Path) -> None:
    folder = copied_run / f"global_step_{STEP}/actor/huggingface"
    named = {
        "config.json": {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}},
        "generation_config.json": {"auto_map": {}},
        "preprocessor_config.json": {"auto_map": {"AutoProcessor": "mine.Mine"}, "size": 4},
        "processor_config.json": {"video": {"auto_map": {"AutoVideoProcessor": "mine.Mine"}}},
    }
    for name, own in named.items():
        file = folder / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | own))
    (folder / "mine.py").write_text("open('ran', 'w')")
    # What needs no change keeps its bytes, whatever it is.
    (folder / "broken_config.json").write_text('{"auto_map"')
    remanifest(copied_run)
    out = tmp_path / "out"
    export.export(copied_run, out)
    for name in named:
        assert "auto_map" not in (out / name).read_text(), name
    assert json.loads((out / "preprocessor_config.json").read_text()) == {"size": 4}
    assert (out / "broken_config.json").read_text() == '{"auto_map"'
    assert not (out / "mine.py").exists() and not Path("ran").exists()
    template = AutoTokenizer.from_pretrained(out).chat_template
    assert template and template == AutoTokenizer.from_pretrained(folder).chat_template


def test_places_of_other_kinds_are_told_apart(tmp_path: Path, tiny_task: Path) -> None:
    verl = tmp_path / "verl/global_step_5/actor"
    verl.mkdir(parents=True)
    (verl / "model_world_size_2_rank_0.pt").write_text("")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/adapter_config.json").write_text("{}")
    (tmp_path / "global_step_2.1234abcd.incomplete").mkdir()
    expected = {
        tmp_path / "verl": "of verl's",
        tmp_path / "verl/global_step_5": "of verl's",
        tmp_path / "peft": "is a peft folder",
        tmp_path / "global_step_2.1234abcd.incomplete": "is half a checkpoint",
        tiny_task / "model": "is a Hugging Face folder already",
        tmp_path / "nowhere": "there is no",
        tmp_path: "not written to the end yet",
        tiny_task: "is no model",
    }
    for place, sentence in expected.items():
        with pytest.raises(CannotUse, match=sentence):
            model_source.find_checkpoint_model(place)


def test_every_name_of_a_checkpoint_leads_to_it(
    run_of: Callable[[str], tuple[Path, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, _ = run_of("plain")
    checkpoint = run_dir / f"global_step_{STEP}"
    monkeypatch.chdir(checkpoint)
    names = (run_dir, checkpoint, checkpoint / "actor", checkpoint / "actor/huggingface", Path("."))
    for place in names:
        assert model_source.find_checkpoint_model(place).checkpoint == checkpoint, place
    (checkpoint / "critic").mkdir()
    with pytest.raises(CannotUse, match="is the critic"):
        model_source.find_checkpoint_model(checkpoint / "critic")
    (checkpoint / "critic").rmdir()


def test_a_folder_that_holds_something_is_never_written_to(
    tmp_path: Path,
    run_of: Callable[[str], tuple[Path, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, _ = run_of("plain")
    out = tmp_path / "out"
    out.mkdir()
    export.export(run_dir, out)
    with pytest.raises(CannotUse, match="is not empty"):
        export.export(run_dir, out)
    with pytest.raises(CannotUse, match="lies in the checkpoint"):
        export.export(run_dir, run_dir / f"global_step_{STEP}/out")

    def fill_up(*arguments: Any, **settings: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(exported_model, "save_file", fill_up)
    assert export.main([str(run_dir), str(tmp_path / "full")]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_links_are_followed_and_a_run_takes_nothing_for_its_own(
    tmp_path: Path, run_of: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    run_dir, _ = run_of("plain")
    checkpoint = run_dir / f"global_step_{STEP}"
    (tmp_path / "inside").symlink_to(checkpoint)
    with pytest.raises(CannotUse, match="lies in the checkpoint"):
        export.export(run_dir, tmp_path / "inside/out")
    with pytest.raises(CannotUse, match="has the name of a checkpoint"):
        export.export(run_dir, run_dir / f"global_step_{STEP + 1}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export.export(run_dir, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/config.json").exists()
    outside = checkpoint / "../.." / "out"
    export.export(run_dir, outside)
    assert (outside.resolve() / "config.json").exists()
    shutil.rmtree(outside.resolve())


def test_weights_are_a_folder_for_engines_as_long_as_the_block_runs(
    tiny_task: Path,
    run_of: Callable[[str], tuple[Path, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, expected = run_of("shared")
    with model_source.local_model(str(run_dir)) as folder:
        assert folder.step == STEP and folder.checkpoint == run_dir / f"global_step_{STEP}"
        model = AutoModelForCausalLM.from_pretrained(folder.path)
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert not Path(folder.path).exists()
    with model_source.local_model(str(tiny_task / "model")) as folder:
        assert folder.path == str(tiny_task / "model")
    monkeypatch.setattr(named_model, "hub_refusal", lambda name: None)
    with model_source.local_model("org/name") as folder:
        assert folder.path == "org/name"


def test_the_card_tells_which_settings_earlier_steps_had(tmp_path: Path, tiny_task: Path) -> None:
    write_run(tmp_path / "run", tiny_task / "model")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    config["algorithm"]["gamma"] = 0.25
    config["trainer"]["default_local_dir"] = "elsewhere"
    first_steps = f"# steps 1 to {STEP - 1}\n" + yaml.safe_dump(config)
    (tmp_path / "run/config.1.yaml").write_text(first_steps)
    export.export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert f"| {STEP - 1} | algorithm.gamma | 0.25 | 1.0 |" in card
    assert "elsewhere" not in card


@pytest.mark.seconds
def test_the_card_tells_how_the_model_came_to_be(tmp_path: Path, tiny_task: Path) -> None:
    write_run(tmp_path / "run", tiny_task / "model")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    config["algorithm"]["adv_estimator"] = "grpo"
    config["agent"]["environment"] |= {"name": "my.module:Game|x", "kwargs": {"api_key": "s3cret"}}
    (tmp_path / "run/config.1.yaml").write_text("# steps 1 to 5\n" + yaml.safe_dump(config))
    records = []
    for step in range(5):
        record = {"step": step, "critic/score/mean": step / 4, "actor/entropy": 1.5}
        if step % 2 == 0:
            record |= {"val-core/game/reward/mean@1": 0.5, "val-core/game/reward/mean@1/tasks": 4}
        records.append(json.dumps(record) + "\n")
    records.append('{"step": 3, "critic/score/mean": "nan"}\n')
    (tmp_path / "run/metrics.jsonl").write_text("".join(records))
    export.export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "grpo"],
    }, "the license is the user's, and a folder is no hub model"
    assert "| base model | " in card and "Not chosen yet" in card
    assert "my.module:Game\\|x" in card and "s3cret" not in card
    assert '| algorithm.adv\\_estimator | "grpo" | "gae" |' in card, "of that step's settings"
    assert "Settings that earlier steps had" not in card
    assert f"## Metrics at step {STEP}" in card and "\n| 4 |" not in card
    assert "![reward by step](curve.png)" in card and "reward/mean@1/tasks |" in card
    metrics = json.loads((tmp_path / "out/training_metrics.json").read_text())
    assert metrics["step"] == STEP and metrics["val-core/game/reward/mean@1"] == 0.5
    assert (tmp_path / "out/curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.seconds
def test_metrics_of_any_name_and_number_cost_no_export(tmp_path: Path, tiny_task: Path) -> None:
    write_run(tmp_path / "run", tiny_task / "model")
    score, name = "critic/score/mean", r"val-core/$\frac{$<script>/reward/mean@1"
    records = [
        {"step": 1, score: 0.5, name: 1.0},
        {"step": 10**30, score: 0.5},
        {"step": -1, score: 0.5},
        {"step": 2, score: 10**400},
        {"step": 3, score: 10**200},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run/metrics.jsonl").write_text(text)
    export.export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "<script>" not in card.replace(r"\<script\>", "")
    assert [line["step"] for line in read_records(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


def test_defaults_are_no_settings_that_differ(tmp_path: Path, tiny_task: Path) -> None:
    write_run(tmp_path / "run", tiny_task / "model")
    export.export(tmp_path / "run", tmp_path / "out")
    settings = (tmp_path / "out/README.md").read_text().split("## Settings")[1]
    rows = [line.split(" | ")[0] for line in settings.split("## Versions")[0].splitlines()[4:]]
    assert [row.strip("| ").replace("\\", "") for row in rows if row] == [
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.dtype",
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.rollout.dtype",
    ]
    assert asdict(PPOConfig())["actor_rollout_ref"]["model"]["lora_alpha"] != 24


@pytest.mark.parametrize(
    "key",
    [
        "trainer.default_local_dir",
        "trainer.resume_mode",
        "supervisor.max_restarts",
        "records.folder",
        "trainer.rollout_data_dir",
    ],
)
def test_settings_of_the_machine_are_left_out(key: str) -> None:
    assert OF_THE_MACHINE.fullmatch(key)


def test_a_missing_run_ends_with_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(tmp_path / "nope"), str(tmp_path / "out")]) == 2
    assert f"there is no {tmp_path / 'nope'}" in capsys.readouterr().err
