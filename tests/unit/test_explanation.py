"""What `--explain` prints besides values: who reads a setting, the bias, and problems."""

from __future__ import annotations

from pathlib import Path

import pytest

import main
from training.config import PPOConfig, bias
from training.config.explain import Reads, explain_run, reader
from training.config.loader import load_config
from training.run.signals import EndingSignals


def test_the_reader_is_where_the_owner_of_the_attribute_is_called_as_the_section() -> None:
    reads: Reads = {
        "lr": {
            "training/config/checks.py": {"optim"},
            "workers/model/schedule.py": {"config"},
            "workers/model/update.py": {"optim"},
            "workers/other.py": {"tutor"},
        }
    }
    assert reader("critic.optim.lr", reads) == "workers/model/update.py"
    # A word of the file's own name decides between equals.
    reads["lr"]["workers/critic.py"] = {"optim"}
    assert reader("critic.optim.lr", reads) == "workers/critic.py"
    # A check reads it, and so does an attribute of something else: the check is all there is.
    reads["lr"] = {"training/config/checks.py": {"optim"}, "workers/other.py": {"tutor"}}
    assert reader("critic.optim.lr", reads) == "training/config/checks.py"


def test_a_setting_that_only_its_section_reads_names_the_file_of_the_section() -> None:
    file = reader("critic.optim.lr", {"lr": {"workers/other.py": {"tutor"}}})
    assert file.startswith("training/config/")
    assert "lr:" in (Path(main.__file__).parent / file).read_text()


def test_the_bias_is_left_out_where_its_table_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(["actor_rollout_ref.model.path=model"], check=False)
    with_table = explain_run(loaded).splitlines()
    assert with_table[-1].startswith("bias of gae, vanilla, token-mean, uncorrected, ")
    monkeypatch.setattr(bias, "TABLE", tmp_path / "bias_table.csv")
    assert bias.bias_line(PPOConfig()) is None
    assert explain_run(loaded).splitlines() == with_table[:-1]


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        ([], "bias of grpo, vanilla, token-mean, uncorrected, "),
        (["algorithm.norm_adv_by_std_in_grpo=false"], "bias of grpo no_std, vanilla, "),
        (["actor_rollout_ref.actor.loss_agg_mode=token-sum"], "bias of grpo, vanilla, seq-mean-t"),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            "bias of grpo, vanilla, token-mean, rollout correction token, ",
        ),
        (
            ["trainer.rollout_n_gpus=1", "trainer.async_level=1"],
            "bias of grpo, vanilla, token-mean, rollout correction token, ",
        ),
        (
            [
                "trainer.rollout_n_gpus=1",
                "trainer.async_level=1",
                "algorithm.rollout_correction.rollout_is=off",
            ],
            "bias of grpo, vanilla, token-mean, uncorrected, ",
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
            "bias of grpo, gspo, seq-mean-token-mean, uncorrected, ",
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token_k1"],
            "bias: grpo, vanilla, rejection of another kind was not enumerated",
        ),
        (["algorithm.adv_estimator=mine"], "bias: mine, vanilla, old was not enumerated"),
    ],
)
def test_the_bias_is_that_of_the_configured_combination(
    overrides: list[str], beginning: str
) -> None:
    config = load_config(["algorithm.adv_estimator=grpo", *overrides], check=False).config
    line = bias.bias_line(config)
    assert line is not None and line.startswith(beginning)


def test_the_numbers_of_the_bias_are_named() -> None:
    row = {f"token-mean/{age}": f"0.{age} 0.{age}5" for age in range(3)}
    combination = ("gae", "vanilla", "old")
    config = load_config(["actor_rollout_ref.model.path=model"], check=False).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bias, "_read_table", lambda: {combination: row})
        line = bias.bias_line(config)
    assert line is not None and line.endswith(
        "(an unbiased estimate has cosine 1 and length ratio 1): fresh samples: cosine 0.0, "
        "length ratio 0.05; samples one update old: cosine 0.1, length ratio 0.15; samples two "
        "updates old: cosine 0.2, length ratio 0.25"
    )


def test_values_are_printed_although_something_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["data.seed=soon", "data.train_batch_size=48", "--explain"]
    assert main.run(argv, EndingSignals()) == 2
    printed = capsys.readouterr()
    lines = {line.split()[0]: line.split()[1:] for line in printed.out.splitlines()}
    assert lines["data.train_batch_size"][:3] == ["48", "command", "line"]
    assert "data.seed='soon' (command line): must be a whole number (or null)" in printed.err
