"""What the viewer's pages hold is what was recorded; what is damaged costs its own episode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.viewer.command import main
from features.viewer.step_credit import read_algorithm
from tests.made_episodes import FATES, Made, make_run
from tests.viewer_data import listed, make_viewer, manifest, page_of, pages
from training.config.loader import load_config
from training.config.reference import to_yaml
from training.core_algos import estimator_facts

NAMES = ("grpo", "rloo", "gae", "turn_return", "gigpo", "opo", "reinforce_plus_plus")


def lines_of(run: Path, step: int) -> list[dict[str, object]]:
    text = (run / f"episodes/{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def write_lines(run: Path, step: int, episodes: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(episode) + "\n" for episode in episodes)
    (run / f"episodes/{step}.jsonl").write_text(text)


def stages(page: dict[str, object]) -> dict[str, float]:
    return {label: value for label, value, _ in page["path"]["stages"]}


@pytest.mark.seconds
def test_a_step_is_explained_by_the_settings_that_it_was_made_with(tmp_path: Path) -> None:
    words = ["algorithm.gamma=0.5", "algorithm.lam=0.25", "algorithm.use_kl_in_reward=true"]
    first = to_yaml(load_config(words, check=False).config)
    (tmp_path / "config.1.yaml").write_text(f"# steps 1 to 2\n{first}")
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([], check=False).config))
    seen = {}
    for step in (2, 3):
        algorithm = read_algorithm(tmp_path, {"step": step})
        seen[step] = (algorithm.gamma, algorithm.lam, algorithm.use_kl_in_reward)
    assert seen == {2: (0.5, 0.25, True), 3: (1.0, 1.0, False)}
    # What the step itself recorded counts.
    recorded = read_algorithm(tmp_path, {"step": 3, "gamma": 0.75, "lam": 0.125})
    assert (recorded.gamma, recorded.lam) == (0.75, 0.125)


@pytest.mark.seconds
def test_the_numbers_of_every_page_are_those_of_the_batch(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=2))
    made = pages(make_viewer(tmp_path))
    for step in (1, 2):
        batch = np.load(tmp_path / f"episodes/{step}.npz")
        token_columns = [name for name in batch if batch[name].shape == batch["fate"].shape]
        assert len(token_columns) >= 12
        for row, episode_id in enumerate(batch["episode_id"].tolist()):
            _, (columns,) = made[episode_id]
            tokens = slice(batch["offsets"][row], batch["offsets"][row + 1])
            for name in token_columns:
                if name != "fate":
                    expected = batch[name][tokens]
                    assert columns[name].dtype == expected.dtype
                    assert np.array_equal(columns[name], expected), name


def test_the_folder_has_every_script_and_style_that_its_page_loads(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', (viewer / "index.html").read_text())
    there = {path.name for path in viewer.iterdir() if path.suffix in (".js", ".css")}
    assert "elements.js" in there and there == {*loaded, "manifest.js"}


@pytest.mark.seconds
def test_fates_keep_their_names_and_sentences(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)
    names = [name for name, _ in manifest(viewer)["fates"]]
    assert dict(manifest(viewer)["fates"])["clipped"] == FATES["clipped"]
    batch = np.load(tmp_path / "episodes/1.npz")
    recorded = list(FATES)
    for row, episode_id in enumerate(batch["episode_id"].tolist()):
        _, (columns,) = pages(viewer)[episode_id]
        codes = batch["fate"][batch["offsets"][row] : batch["offsets"][row + 1]]
        told = [names[fate] for fate in columns["fate"]]
        assert told == [recorded[code] for code in codes]


@pytest.mark.seconds
@pytest.mark.parametrize("estimator", NAMES)
def test_advantages_computed_again_are_those_recorded(tmp_path: Path, estimator: str) -> None:
    extra = (*Made().extra, "values") if estimator == "gae" else Made().extra
    make_run(tmp_path, Made(steps=1, estimator=estimator, extra=extra))
    for page, _ in pages(make_viewer(tmp_path)).values():
        assert page["path"]["estimator"] == estimator
        assert page["path"]["check"]["difference"] < 1e-6
        assert page["path"]["notes"] == []


def test_an_advantage_that_is_not_the_estimators_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    file = tmp_path / "episodes/1.npz"
    batch = dict(np.load(file))
    batch["advantages"] = batch["advantages"] + 0.5 * batch["response_mask"].astype(np.float32)
    np.savez(file, **batch)
    page, _ = next(iter(pages(make_viewer(tmp_path)).values()))
    assert page["path"]["check"]["agrees"] is False
    assert "differ from those recorded by up to 0.5" in page["path"]["notes"][0]


@pytest.mark.seconds
def test_grpos_path_is_score_mean_and_spread(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)
    scores = [episode["reward"] for episode in lines_of(tmp_path, 1)[:4]]
    for member, score in enumerate(scores):
        page, (columns,) = pages(viewer)[f"episode-1-0-{member}"]
        told = stages(page)
        assert told["return"] == pytest.approx(score, abs=1e-6)
        assert told["group mean"] == pytest.approx(np.mean(scores), abs=1e-6)
        assert told["spread"] == pytest.approx(np.std(scores, ddof=1), abs=1e-6)
        advantage = (score - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        assert told["advantage"] == pytest.approx(advantage, abs=1e-5)
        members = page["path"]["members"]["rows"]
        assert [row["score"] for row in members] == pytest.approx(scores, abs=1e-6)
        assert columns["advantages"].max() == pytest.approx(max(advantage, 0), abs=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize("estimator", ["rloo", "opo", "maxrl"])
def test_a_path_shows_the_formula_as_registered_and_the_groups_numbers(
    tmp_path: Path, estimator: str
) -> None:
    make_run(tmp_path, Made(steps=1, estimator=estimator))
    scores = [episode["reward"] for episode in lines_of(tmp_path, 1)[:4]]
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert page["path"]["formula"] == estimator_facts(estimator).formula != ""
    assert stages(page)["group mean"] == pytest.approx(np.mean(scores), abs=1e-6)


def test_gaes_turns_have_values_and_deltas(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1, estimator="gae", extra=(*Made().extra, "values")))
    page, (columns,) = pages(make_viewer(tmp_path))["episode-1-1-2"]
    table = page["path"]["turns"]
    names = [name for name, _ in table["columns"]]
    sampled = columns["response_mask"] > 0
    following = np.append(columns["values"][sampled][1:], 0)
    deltas = columns["token_level_rewards"][sampled] + following - columns["values"][sampled]
    for turn, row in enumerate(table["rows"]):
        of_turn = columns["turn_ids"][sampled] == turn
        told = dict(zip(names, row, strict=True))
        assert told["value"] == pytest.approx(columns["values"][sampled][of_turn][0])
        assert told["delta"] == pytest.approx(deltas[of_turn].sum(), abs=1e-4)
        assert told["tokens"] == of_turn.sum()
        assert told["turn"] == turn + 1


def test_turn_returns_baseline_is_the_others_mean(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1, estimator="turn_return"))
    scores = [episode["reward"] for episode in lines_of(tmp_path, 1)[:4]]
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-0"]
    names = [name for name, _ in page["path"]["turns"]["columns"]]
    for row in page["path"]["turns"]["rows"]:
        # All of the reward is paid in the last turn: every turn's return is the score.
        assert row[names.index("others")] == pytest.approx(np.mean(scores[1:]), abs=1e-6)


def test_an_estimator_that_compares_states_shows_the_group_and_who_shared_a_state(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, Made(steps=1, estimator="gigpo"))
    scores = [episode["reward"] for episode in lines_of(tmp_path, 1)[:4]]
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert stages(page)["group mean"] == pytest.approx(np.mean(scores), abs=1e-6)
    table = page["path"]["turns"]
    names = [name for name, _ in table["columns"]]
    # Every member's turn k begins in state k.
    assert [row[names.index("same state")] for row in table["rows"]] == [4, 4, 4]


def test_the_list_counts_and_marks(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    episodes = lines_of(tmp_path, 1)
    for turn in episodes[3]["turns"]:
        turn["text"] = " \n"
    write_lines(tmp_path, 1, episodes)
    rows = listed(make_viewer(tmp_path))
    batch = np.load(tmp_path / "episodes/1.npz")
    for place, row in enumerate(rows):
        tokens = slice(batch["offsets"][place], batch["offsets"][place + 1])
        sampled = batch["response_mask"][tokens] > 0
        difference = batch["rollout_log_probs"][tokens] - batch["old_log_probs"][tokens]
        assert row["mismatch"] == pytest.approx(np.abs(difference[sampled]).max(), abs=1e-7)
        assert row["gradient"] == pytest.approx(batch["gradient_share"][place])
        moved = np.abs(batch["log_prob"][tokens] - batch["old_log_probs"][tokens])[sampled]
        assert row["ratio"] == pytest.approx(np.exp(moved.max()), rel=1e-6)
        assert row["no_spread"] == (place >= 12)
        assert row["empty"] == (place == 3)
        assert row["attempts"] == episodes[place]["attempts"]
        assert row["stale"] == (place % 5 == 0)
        assert row["tools"] == "look_up"
    assert len({row["task"] for row in rows}) == 4


@pytest.mark.seconds
def test_a_task_is_the_same_over_steps_and_runs(tmp_path: Path) -> None:
    made = Made(steps=2, initial="Find the word in room {1}.")
    make_run(tmp_path / "one", made)
    make_run(tmp_path / "other", Made(steps=2, seed=1, initial="Find the word in room {1}."))
    rows = listed(make_viewer(tmp_path / "one", tmp_path / "other"))
    assert len({row["task"] for row in rows}) == 4
    assert {(row["run"], row["step"]) for row in rows} == {(0, 1), (0, 2), (1, 1), (1, 2)}


def test_a_task_that_its_environment_names_is_one_whatever_its_seed(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=2))
    for step in (1, 2):
        episodes = lines_of(tmp_path, step)
        for number, episode in enumerate(episodes):
            episode["task_name"] = "even" if number % 2 == 0 else ""
        write_lines(tmp_path, step, episodes)
    rows = listed(make_viewer(tmp_path))
    assert len({row["task"] for row in rows if row["task_name"] == "even"}) == 1
    assert {row["task_name"] for row in rows} == {"even", *(f"seed {100 + n}" for n in range(4))}


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"task_name": "x" * 500}, "x" * 80),
        ({"task_name": {"deep": [1]}}, '{"deep": [1]}'),
        ({"task": {"question": "how?"}}, '{"question": "how?"}'),
        ({"task": {"question": "h" * 500}}, '{"question": "' + "h" * 65 + "…"),
        ({"env_seed": None}, ""),
        ({"environment": ""}, ""),
    ],
)
def test_a_task_is_labelled_whatever_its_record_says(
    tmp_path: Path, changes: dict[str, Any], label: str
) -> None:
    make_run(tmp_path, Made(steps=1, groups=1, members=1))
    (episode,) = lines_of(tmp_path, 1)
    write_lines(tmp_path, 1, [{**episode, **changes}])
    (row,) = listed(make_viewer(tmp_path))
    assert row["task_name"] == label


@pytest.mark.seconds
def test_damaged_lines_and_files_cost_their_own_episodes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=3))
    lines = (folder / "1.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[4])["rows"][0]
    short = {**row, "turn_ids": [0, 0]}
    lines[1] = "no json\n"
    lines[2] = "[1, 2]\n"
    lines[3] = json.dumps({**json.loads(lines[3]), "rows": [short]}) + "\n"
    lines[4] = "[" * 5000 + "\n"
    lines[5] = json.dumps({**json.loads(lines[5]), "turns": "none"}) + "\n"
    lines[-1] = lines[-1][:200]
    (folder / "1.jsonl").write_text("".join(lines))
    content = (folder / "2.npz").read_bytes()
    (folder / "2.npz").write_bytes(content[: len(content) // 2])
    (folder / "3.npz").unlink()
    (folder / "4.jsonl").write_text("")
    viewer = make_viewer(tmp_path)
    assert len(listed(viewer)) == 16 * 3 - 6
    faults = "\n".join(manifest(viewer)["faults"])
    for sentence in (
        "1.jsonl line 2 is no JSON",
        "1.jsonl line 3 is no JSON object",
        "2 turn_ids",
        "1.jsonl line 5 is no JSON",
        "1.jsonl line 6 turns is no list of objects",
        "1.jsonl line 16 is cut short",
        "2.npz cannot be read",
    ):
        assert sentence in faults
    page, (columns,) = pages(viewer)["episode-2-0-0"]
    assert page["path"]["estimator"] == ""
    assert "advantages" not in columns


def test_rows_that_do_not_fit_the_update_keep_what_was_generated(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=1))
    episodes = lines_of(tmp_path, 1)
    row = episodes[0]["rows"][0]
    for name in ("response_ids", "response_mask", "turn_ids", "template_mask", "log_probs"):
        row[name] = [1, 1, 1]
    row["rewards"] = [0, 0, 1]
    write_lines(tmp_path, 1, episodes)
    page, (columns,) = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert "3 tokens" in page["faults"][0]
    assert columns["response_ids"].tolist() == [1, 1, 1]
    assert "advantages" not in columns
    assert (folder / "1.npz").exists()


def test_plain_lists_nulls_and_numbers_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    episodes = lines_of(tmp_path, 1)[:1]
    row = {
        "prompt_ids": [5],
        "response_ids": [6, 7],
        "response_mask": [1, 1],
        "turn_ids": [0, 0],
        "log_probs": [None, -0.5],
        "rewards": [0, 1],
    }
    episodes[0]["rows"] = [row]
    episodes[0]["reward"] = None
    episodes[0]["initial_messages"] = [{"role": "user", "content": [{"text": "a"}, {"type": "x"}]}]
    write_lines(tmp_path, 1, episodes)
    (tmp_path / "episodes/1.npz").unlink()
    viewer = make_viewer(tmp_path)
    (only,) = listed(viewer)
    assert np.isnan(only["reward"])
    page, (columns,) = page_of(viewer, only)
    assert np.isnan(columns["log_probs"][0]) and columns["log_probs"][1] == np.float32(-0.5)
    assert page["messages"] == [["user", "a[x]"]]
    assert stages(page)["reward"] == "NaN"


def test_validation_has_no_update_and_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=1))
    (folder / "1.jsonl").rename(folder / "val-1.jsonl")
    viewer = make_viewer(tmp_path)
    names = [name for name, _ in manifest(viewer)["fates"]]
    _, (columns,) = pages(viewer)["episode-1-0-0"]
    fates = {names[fate] for fate in columns["fate"]}
    assert fates == {"validation", "environment", "template"}
    assert all(row["val"] for row in listed(viewer))


def test_episodes_that_never_reached_the_update_say_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=1))
    batch = dict(np.load(folder / "1.npz"))
    meta = json.loads(str(batch["meta"]))
    meta["dropped"] = [{"episode_id": "episode-1-9-9", "uid": "group", "why": "filtered"}]
    batch["meta"] = np.array(json.dumps(meta))
    np.savez(folder / "1.npz", **batch)
    episodes = lines_of(tmp_path, 1)
    write_lines(tmp_path, 1, [*episodes, {**episodes[0], "episode_id": "episode-1-9-9"}])
    viewer = make_viewer(tmp_path)
    fates = manifest(viewer)["fates"]
    _, (columns,) = pages(viewer)["episode-1-9-9"]
    told = {tuple(fates[fate]) for fate in columns["fate"]}
    assert ("filtered", FATES["filtered"]) in told


def test_several_rows_of_an_episode_share_its_path(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=1))
    episodes = lines_of(tmp_path, 1)
    second = {**episodes[1]["rows"][0], "parent": {"row": 0, "tokens": 9}}
    episodes[0]["rows"].append(second)
    write_lines(tmp_path, 1, [episodes[0], *episodes[2:]])
    batch = dict(np.load(folder / "1.npz"))
    batch["episode_id"] = np.where(np.arange(16) == 1, batch["episode_id"][0], batch["episode_id"])
    batch["episode_row"][1] = 1
    np.savez(folder / "1.npz", **batch)
    page, columns = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert [row["parent"] for row in page["rows"]] == [None, {"row": 0, "tokens": 9}]
    total = batch["token_level_rewards"][: batch["offsets"][2]].sum()
    assert stages(page)["return"] == pytest.approx(total)
    assert len(columns) == 2 and "advantages" in columns[1]


def test_a_folder_that_is_no_viewer_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, Made(steps=1))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thing").write_text("kept")
    assert main([str(tmp_path), "--out", str(tmp_path / "precious")]) == 2
    assert "is no viewer: name another folder" in capsys.readouterr().err
    assert (tmp_path / "precious/thing").read_text() == "kept"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "holds no episodes" in capsys.readouterr().err


def test_nobodys_files_are_lost_beside_a_viewer_or_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, Made(steps=1))
    (tmp_path / "viewer.new").mkdir()
    (tmp_path / "viewer.new/thing").write_text("kept")
    viewer = make_viewer(tmp_path)
    assert (tmp_path / "viewer.new/thing").read_text() == "kept"
    (viewer / "notes.txt").write_text("what I saw")
    assert main([str(tmp_path)]) == 2
    assert "notes.txt in it is not of one" in capsys.readouterr().err
    assert (viewer / "notes.txt").exists() and (viewer / "index.html").exists()
    extension = tmp_path / "extension"
    extension.mkdir()
    (extension / "manifest.js").write_text("mine()")
    assert main([str(tmp_path), "--out", str(extension)]) == 2
    assert (extension / "manifest.js").read_text() == "mine()"
    assert main([str(tmp_path), "--out", str(extension / "manifest.js")]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_link_and_the_folder_that_one_stands_in_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", Made(steps=1))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for _ in range(2):
        assert main([str(tmp_path / "run"), "--out", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there/index.html").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([str(tmp_path / "run"), "--out", "."]) == 0
    assert (tmp_path / "here/index.html").exists()


def test_what_breaks_off_leaves_the_old_viewer_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("features.viewer.data_files.DataFolder.write", full)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([str(tmp_path)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (viewer / "index.html").exists()


def test_runs_of_one_name_are_told_apart_and_one_run_is_not_taken_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one/seed/run"
    other = tmp_path / "other/seed/run"
    for run in (one, other):
        make_run(run, Made(steps=1))
    viewer = make_viewer(one, other)
    labels = [run["label"] for run in manifest(viewer)["runs"]]
    assert labels == [str(one), str(other)]
    assert main([str(one), str(one / "episodes")]) == 2
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_viewer_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=2))
    viewer = make_viewer(tmp_path)
    (folder / "2.jsonl").unlink()
    assert {row["step"] for row in listed(make_viewer(tmp_path))} == {1}
    assert (viewer / "index.html").exists() and not (tmp_path / "viewer.new").exists()


ODD = (None, 0, -1, 1e400, 10**400, True, "", "x" * 1000, [], {}, [[]], [{}], {"a": [1]}, [None])


@pytest.mark.seconds
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__} {str(odd)[:9]}")
def test_an_odd_entry_costs_at_most_its_episode(tmp_path: Path, odd: object) -> None:
    make_run(tmp_path, Made(steps=1, groups=12, members=4))
    episodes = lines_of(tmp_path, 1)
    entries = list(episodes[0])
    changed = [(name,) for name in entries]
    changed += [("turns", name) for name in episodes[0]["turns"][0]]
    changed += [("rows", name) for name in episodes[0]["rows"][0]]
    for episode, (name, *inner) in zip(episodes[: len(changed)], changed, strict=False):
        if inner:
            episode[name][0][inner[0]] = odd
        else:
            episode[name] = odd
    last = episodes[-1]["episode_id"]
    write_lines(tmp_path, 1, episodes)
    viewer = make_viewer(tmp_path)
    rows = listed(viewer)
    lost = len(episodes) - len(rows)
    assert lost == sum("line" in fault for fault in manifest(viewer)["faults"])
    page, _ = pages(viewer)[last]
    assert page["path"]["check"]["agrees"]
    assert [row["text_page"] for row in rows] == sorted(row["text_page"] for row in rows)


def test_a_deeply_nested_task_is_cut(tmp_path: Path) -> None:
    make_run(tmp_path, Made(steps=1))
    episodes = lines_of(tmp_path, 1)
    deep: object = "end"
    for _ in range(400):
        deep = [deep]
    episodes[0]["task"] = {"deep": deep}
    write_lines(tmp_path, 1, episodes)
    page, _ = pages(make_viewer(tmp_path))["episode-1-0-0"]
    assert "…" in json.dumps(page["facts"]["task"], ensure_ascii=False)


def test_columns_that_no_page_can_hold_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, Made(steps=1))
    batch = dict(np.load(folder / "1.npz"))
    batch["entropy"] = batch["entropy"].astype(complex)
    batch["values"] = batch["advantages"][:-3]
    meta = json.loads(str(batch["meta"]))
    batch["meta"] = np.array(json.dumps({**meta, "gamma": "much"}))
    np.savez(folder / "1.npz", **batch)
    viewer = make_viewer(tmp_path)
    faults = " ".join(manifest(viewer)["faults"])
    assert "entropy is complex128" in faults and "values is float32" in faults
    _, (columns,) = pages(viewer)["episode-1-0-0"]
    assert "entropy" not in columns and "advantages" in columns
