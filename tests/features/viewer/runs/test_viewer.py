"""The viewer of a real run in a real browser: filters, cards, groups, tasks, searches, keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.browser import Browser
from tests.e2e.test_agents import ROLLOUT, fit, game_config
from tests.made_episodes import Made, make_run
from tests.viewer_data import listed, make_viewer
from tests.viewer_pages import open_viewer, searched, show

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with its viewer, whose tasks come again."""
    folder = tmp_path_factory.mktemp("made")
    make_run(folder, Made(steps=3, initial="Find the word in room {1}."))
    make_viewer(folder)
    return folder


def page(run: Path, place: str = "") -> str:
    return (run / "viewer/index.html").as_uri() + place


def numbers_of_card(browser: Browser) -> dict[str, str]:
    script = """return Object.fromEntries([...document.querySelectorAll(".card [data-column]")]
        .map((cell) => [cell.dataset.column, cell.dataset.value]))"""
    return browser.run(script)


def ids_in_list(browser: Browser) -> list[str]:
    return browser.run("return viewer.listed.rows.map((i) => viewer.table.ids[i])")


BRANCHES = """
import os, runpy, sys
ask = runpy.run_path(os.environ["START_DIR"] + "/examples/guess_program.py")["ask"]
messages = [{"role": "user", "content": "guess"}]
messages.append({"role": "assistant", "content": ask(messages)})
for hint in ("higher", "lower"):
    ask([*messages, {"role": "user", "content": hint}])
print("told to nobody", file=sys.stderr)
print(0.5)
"""


def test_a_programs_branches_are_a_tree_and_its_errors_are_shown(
    tiny_game: Path, tmp_path: Path, browser: Browser
) -> None:
    (tmp_path / "branches.py").write_text(BRANCHES)
    programs = pytest.importorskip("tests.features.programs.runs.test_programs")
    settings = programs.running(f"{sys.executable} {tmp_path}/branches.py")
    fit(game_config(tiny_game, tmp_path / "run", *settings, "trainer.total_training_steps=1"))
    make_viewer(tmp_path / "run")
    browser.open(page(tmp_path / "run", "#list"))
    address = browser.run("return viewer.episodeAddress(0, {color: 'fate'})")
    browser.open(page(tmp_path / "run", address))
    browser.wait("document.querySelector('.tree li li .node')")
    text = browser.run("return document.querySelector('.tree li li .node').textContent")
    assert text.startswith("row 1: turn 3, ") and "tokens of row 0" in text
    assert "template" not in text and "another history" in text
    text = browser.run("return document.querySelector('.program').textContent")
    assert "exit code: 0" in text and "told to nobody" in text and "forks 1" in text
    talk = browser.run("return document.querySelector('.talk').textContent")
    assert talk.index("higher") < talk.index("goes on behind turn 1") < talk.index("lower")


def test_a_tokens_card_shows_the_batch_that_was_trained_on(
    tiny_game: Path, tmp_path: Path, browser: Browser
) -> None:
    config = game_config(tiny_game, tmp_path / "run", f"{ROLLOUT}.n=2")
    _, batches = fit(config)
    viewer = make_viewer(tmp_path / "run")
    assert listed(viewer)
    batch = batches[0]
    row = int(batch.batch["response_mask"].sum(dim=1).argmax())
    episode_id = batch.non_tensor_batch["episode_id"][row]
    sampled = batch.batch["response_mask"][row].nonzero()[:, 0].tolist()
    step = batch.meta_info["global_steps"]
    for token in (sampled[0], sampled[-1]):
        place = f"#episode/0/train/{step}/{episode_id}?row=0&token={token}&color=advantage"
        open_viewer(browser, page(tmp_path / "run", place))
        told = numbers_of_card(browser)
        compared = 0
        for name in batch.batch.keys():  # noqa: SIM118  (a TensorDict's iterator gives rows)
            if name in told and batch.batch[name].shape == batch.batch["response_mask"].shape:
                assert float(told[name]) == pytest.approx(float(batch.batch[name][row, token]))
                compared += 1
        assert compared >= 6
        (shown_id,) = browser.texts(".card [data-key=id]")
        assert int(shown_id) == int(batch.batch["responses"][row, token])
    assert browser.texts(".card .why")[0]
    assert browser.console() == []


def test_a_click_on_a_token_opens_its_card_and_the_address_says_so(
    made_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(made_run, "#episode/0/train/2/episode-2-1-0?color=fate"))
    browser.click('.talk span[data-i="3"]')
    batch = np.load(made_run / "episodes/2.npz")
    row = batch["episode_id"].tolist().index("episode-2-1-0")
    place = batch["offsets"][row] + 3
    told = numbers_of_card(browser)
    for name in ("advantages", "old_log_probs", "log_prob", "entropy", "policy_weight"):
        assert np.float32(told[name]) == batch[name][place]
    assert float(told["Probability ratio"]) == pytest.approx(
        np.exp(batch["log_prob"][place] - batch["old_log_probs"][place]), rel=1e-5
    )
    assert "token=3" in browser.run("return location.hash")
    browser.press("\ue00c")
    assert browser.texts(".card") == []


def test_the_path_shows_the_numbers_of_the_builder(made_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(made_run, "#episode/0/train/1/episode-1-0-1"))
    lines = (made_run / "episodes/1.jsonl").read_text().splitlines()
    scores = [json.loads(line)["reward"] for line in lines[:4]]
    script = """return Object.fromEntries([...document.querySelectorAll("[data-stage]")]
        .map((cell) => [cell.dataset.stage, cell.dataset.value]))"""
    told = browser.run(script)
    assert float(told["group mean"]) == pytest.approx(np.mean(scores), abs=1e-6)
    assert float(told["spread"]) == pytest.approx(np.std(scores, ddof=1), abs=1e-6)
    assert len(browser.texts(".members tbody tr")) == 4
    assert len(browser.texts(".turn-table tbody tr")) == 3


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("step=2", lambda row: row["step"] == 2),
        ("ending=env_crash", lambda row: row["ending"] == "env_crash"),
        ("spread=0", lambda row: row["no_spread"]),
        ("refilled=1", lambda row: row["attempts"] > 1),
        ("stale=1", lambda row: row["stale"]),
        ("failed=1", lambda row: row["failed"]),
        ("reward=0.5..1&tool=look_up", lambda row: 0.5 <= row["reward"] <= 1),
        ("kind=val", lambda row: row["val"]),
        ("group=group-1-2", lambda row: row["uid"] == "group-1-2"),
        ("fate=no_spread", lambda row: row["no_spread"]),
        ("step=nonsense", lambda row: False),
    ],
)
def test_an_address_filters_the_list(
    made_run: Path, browser: Browser, query: str, expected: Any
) -> None:
    open_viewer(browser, page(made_run, f"#list?{query}"))
    rows = listed(made_run / "viewer")
    assert ids_in_list(browser) == [row["id"] for row in rows if expected(row)]


@pytest.mark.parametrize("key", ["reward", "mismatch", "ratio", "entropy", "kl", "gradient"])
def test_the_list_is_sorted_by_every_key(made_run: Path, browser: Browser, key: str) -> None:
    rows = listed(made_run / "viewer")
    for sort, reverse in ((key, False), (f"-{key}", True)):
        open_viewer(browser, page(made_run, f"#list?sort={sort}"))
        expected = [row["id"] for row in sorted(rows, key=lambda row: row[key], reverse=reverse)]
        assert ids_in_list(browser) == expected


@pytest.fixture(scope="module")
def tasks_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of four tasks: never, always and later solved, and one that is slow and named."""
    folder = tmp_path_factory.mktemp("tasks")
    changes = {}
    for step in range(1, 5):
        for group in range(4):
            for member in range(2):
                reward = float((group == 1) or (group == 2 and step > 2) or (group == 3 and member))
                changes[f"episode-{step}-{group}-{member}"] = {
                    "reward": reward,
                    "seconds": 60.0 + step if group == 3 else 1.0,
                    "task_name": "the long way" if group == 3 else "",
                    "env_seed": 1000 * step if group == 3 else 100 + group,
                }
    made = Made(steps=4, groups=4, members=2, initial="Find it in room {1}.", changes=changes)
    make_run(folder, made)
    make_viewer(folder)
    return folder


def tasks_shown(browser: Browser) -> list[list[str]]:
    script = """return [...document.querySelectorAll('.task-table tbody tr')].map((row) =>
        [...row.children].map((cell) => cell.textContent))"""
    return browser.run(script)


def test_tasks_are_listed_with_how_often_each_was_solved(tasks_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(tasks_run, "#tasks"))
    shown = tasks_shown(browser)
    assert [row[0].removesuffix(" list") for row in shown] == [
        "seed 100 Find it in room 0.",
        "seed 102 Find it in room 2.",
        "the long way Find it in room 3.",
        "seed 101 Find it in room 1.",
    ]
    assert [row[1] for row in shown] == ["0 %", "50 %", "50 %", "100 %"]
    assert [row[3] for row in shown] == ["0 %", "+100 %", "0 %", "0 %"]
    sparks = "[...document.querySelectorAll('.spark')].map((s) => s.getAttribute('aria-label'))"
    assert browser.run(f"return {sparks}")[1] == "solved 0 % at step 1, 100 % at step 4"
    for place, (kind, expected) in enumerate((("never", 1), ("sometimes", 2), ("always", 1))):
        open_viewer(browser, page(tasks_run, "#tasks"))
        browser.run("document.querySelectorAll('.tasks-bar .chip')[arguments[0]].click()", place)
        browser.wait(f"location.hash.includes('solved={kind}')")
        browser.wait(f"document.querySelectorAll('.task-table tbody tr').length === {expected}")


def test_the_slowest_task_leads_to_its_slowest_episode(tasks_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(tasks_run, "#tasks?sort=-longest"))
    assert tasks_shown(browser)[0][0].startswith("the long way")
    browser.run("document.querySelector('.task-table tbody td:last-child a').click()")
    browser.wait("location.hash.includes('episode-4-3-0')")


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("solved=never", 8),
        ("solved=always", 8),
        ("solved=sometimes", 16),
        ("name=the+long+way", 8),
        ("seconds=60..", 8),
        ("solved=always&pass=2", 0),
        ("solved=nonsense", 0),
    ],
)
def test_the_list_is_filtered_by_what_became_of_tasks(
    tasks_run: Path, browser: Browser, query: str, count: int
) -> None:
    open_viewer(browser, page(tasks_run, f"#list?{query}"))
    assert len(ids_in_list(browser)) == count


def test_many_tasks_are_drawn_as_one_asks_for_them(long_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(long_run, "#tasks"))
    assert len(tasks_shown(browser)) == 60
    browser.run("document.querySelector('.scroll + button').click()")
    assert 100 < len(tasks_shown(browser)) <= 120
    assert not browser.run("return document.querySelector('.scroll + button').checkVisibility()")


def test_the_list_shows_the_columns_that_are_chosen(tasks_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(tasks_run, "#list?columns=answer,seconds,ending,tokens,nonsense"))
    heads = "return [...document.querySelectorAll('.list-head .cell')].map((c) => c.textContent)"
    assert browser.run(heads) == ["Answer", "Seconds", "Ending", "Tokens"]
    browser.wait("viewer.answers")
    line = json.loads((tasks_run / "episodes/1.jsonl").read_text().splitlines()[0])
    answer = line["turns"][-1]["text"]
    assert answer[-100:] in browser.texts(".list-row .c-answer")[0]
    browser.run(
        "const box = [...document.querySelectorAll('.columns-pick label')]"
        ".find((l) => l.textContent.trim() === 'Ending').querySelector('input'); box.click()"
    )
    browser.wait("!document.querySelector('.list-head .c-ending')")
    assert browser.run(heads) == ["Answer", "Seconds", "Tokens"]
    browser.run("document.querySelector('.columns-pick button').click()")
    browser.wait("document.querySelector('.list-head .c-text')")


def test_a_turn_says_what_engine_and_environment_took(tasks_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(tasks_run, "#episode/0/train/1/episode-1-0-0"))
    tags = browser.texts(".bubble.policy h3 .tag")
    assert browser.texts(".bubble.policy h3")[0].startswith("policy, turn 1")
    assert browser.texts(".turn-table tbody td")[0] == "1"
    assert browser.texts(".again option")[0] == "from turn 1 on"
    assert tags[:2] == ["engine 0.25 s", "environment 0.01 s"]
    assert "seconds1 (engine 0.75, environment 0.2)" in browser.texts("dl.chips .fact")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of many steps, of 480 episodes."""
    folder = tmp_path_factory.mktemp("long")
    make_run(folder, Made(steps=120, groups=1, members=4, tokens=12))
    make_viewer(folder)
    return folder


@pytest.mark.parametrize("width", [1400, 901, 900, 880, 800, 640, 390, 320])
def test_the_list_holds_the_rows_in_sight_alone_at_every_width(
    long_run: Path, browser: Browser, width: int
) -> None:
    browser.resize(width, 844)
    open_viewer(browser, page(long_run))
    rows = "return document.querySelectorAll('.list-row').length"
    assert 10 < browser.run(rows) <= 80
    browser.run("document.querySelector('.list-scroll').scrollTop = 1e9")
    browser.wait("document.querySelector('.list-row[data-place=\"479\"]')")
    assert browser.run(rows) <= 80
    browser.resize(1400, 900)


def test_a_list_that_a_style_makes_as_long_as_the_run_still_holds_few_rows(
    long_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(long_run))
    browser.run("document.querySelector('.list').style.cssText = 'height: 16400px; flex: none'")
    browser.run("dispatchEvent(new Event('resize'))")
    browser.wait("document.querySelector('.list-scroll').clientHeight > 16000")
    browser.run("document.querySelector('.list-scroll').dispatchEvent(new Event('scroll'))")
    assert browser.run("return document.querySelectorAll('.list-row').length") <= 80


def test_many_steps_share_the_columns_of_their_distribution(
    long_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(long_run))
    by_step = (
        "[...document.querySelectorAll('.facet')].find((f) => f.textContent.includes('by step'))"
    )
    assert browser.run(f"return {by_step}.querySelectorAll('.column').length") == 60
    browser.run(f"{by_step}.querySelectorAll('.column')[1].click()")
    browser.wait("document.querySelectorAll('.chip').length === 1")
    assert browser.texts(".chip")[0].startswith("step 3 to 4")
    assert browser.run(
        "return [...new Set(viewer.listed.rows.map((i) => viewer.table.step[i]))]"
    ) == [
        3,
        4,
    ]


def test_a_click_into_a_distribution_filters_and_again_takes_it_back(
    made_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(made_run))
    rows = listed(made_run / "viewer")
    browser.run("document.querySelectorAll('.columns')[0].lastChild.click()")
    browser.wait("location.hash.includes('reward=')")
    browser.wait("document.querySelectorAll('.chip').length === 1")
    shown = ids_in_list(browser)
    highest = sorted(rows, key=lambda row: row["reward"])[-1]
    assert highest["id"] in shown and len(shown) < len(rows)
    browser.click(".chip")
    browser.wait("document.querySelectorAll('.chip').length === 0")
    assert len(ids_in_list(browser)) == len(rows)


@pytest.mark.parametrize("part", [slice(0, 25), slice(3, 6), slice(4, 6), slice(7, 8)])
def test_a_search_finds_all_that_holds_the_text(
    made_run: Path, browser: Browser, part: slice
) -> None:
    lines = [
        json.loads(line)
        for step in (1, 2, 3)
        for line in (made_run / f"episodes/{step}.jsonl").read_text().splitlines()
    ]
    text = lines[5]["turns"][1]["text"][part].upper()
    open_viewer(browser, page(made_run))
    browser.run("location.hash = viewer.listAddress({ text: arguments[0] })", text)
    browser.wait(
        "viewer.listed.found?.text === arguments[0] && (viewer.listed.found.isExact"
        " || viewer.listed.rows.every((i) => viewer.listed.found.looked[i]))",
        text,
    )
    words = text.lower()
    expected = [
        line["episode_id"]
        for line in lines
        if any(
            words in said.lower()
            for said in [
                *(message["content"] for message in line["initial_messages"]),
                *(turn["text"] for turn in line["turns"]),
                *(m["content"] for turn in line["turns"] for m in turn["observation"]),
                line["error"],
                line["episode_id"],
                line["uid"],
                *(attempt["error"] for attempt in line["failed_attempts"]),
            ]
        )
    ]
    assert expected and ids_in_list(browser) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_counts_of_short_texts_are_exact_without_a_look_into_texts(
    long_run: Path, browser: Browser, length: int
) -> None:
    episodes = [
        json.loads(line)
        for step in range(1, 121)
        for line in (long_run / f"episodes/{step}.jsonl").read_text().splitlines()
    ]
    text = episodes[7]["turns"][0]["text"][:length].upper()
    holding = [
        episode["episode_id"]
        for episode in episodes
        if any(
            text.lower() in said.lower()
            for said in [
                *(message["content"] for message in episode["initial_messages"]),
                *(turn["text"] for turn in episode["turns"]),
                *(m["content"] for turn in episode["turns"] for m in turn["observation"]),
                episode["error"],
                episode["episode_id"],
                episode["uid"],
                *(attempt["error"] for attempt in episode["failed_attempts"]),
            ]
        )
    ]
    # The list would go on to read all texts.
    open_viewer(browser, page(long_run, "#tasks"))
    found = searched(browser, text)
    assert found[0] == (length <= 5)
    assert (found[1] == holding) if length <= 5 else (set(holding) <= set(found[1]))


def test_rows_that_come_into_sight_show_where_they_hold_the_text(
    long_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(long_run, "#list?text=hides"))
    assert browser.texts(".status")[0] == "480 of 480 episodes"
    browser.wait("viewer.listed.isSettled")
    browser.run("document.querySelector('.list-scroll').scrollTop = 12000")
    browser.wait("[...document.querySelectorAll('.list-row mark')].length > 10")
    looked = browser.run("return viewer.listed.found.looked.reduce((sum, one) => sum + one, 0)")
    assert looked < 480


def test_a_group_stands_side_by_side_from_the_first_difference_on(
    made_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(made_run, "#group/0/train/1/group-1-0"))
    assert len(browser.texts(".member")) == 4
    assert "the beginning" in browser.texts(".common summary")[0]
    assert len(browser.texts(".turn-cell")) == 12


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_group_of_one_is_not_said_to_have_no_advantage(
    tmp_path: Path, browser: Browser, estimator: str
) -> None:
    make_run(tmp_path, Made(steps=1, members=1, estimator=estimator))
    make_viewer(tmp_path)
    open_viewer(browser, page(tmp_path, "#list"))
    reward = browser.run("return viewer.short(viewer.table.reward[0])")
    browser.run("location.hash = viewer.groupAddress(0)")
    browser.wait("document.querySelector('article.group')")
    assert browser.texts("article.group > p")[0] == f"A reward of {reward}."


def test_a_task_is_shown_over_steps_and_runs(tmp_path: Path, browser: Browser) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        make_run(tmp_path / name, Made(steps=2, seed=seed, initial="Find it in room {1}."))
    viewer = make_viewer(tmp_path / "one", tmp_path / "other")
    key = listed(viewer)[0]["task"]
    open_viewer(browser, page(tmp_path / "one", f"#task/{key}"))
    assert len(browser.texts(".meetings tbody tr")) == 4
    browser.run("for (const k of [0, 4]) document.querySelectorAll('.pick input')[k].click()")
    browser.wait("document.querySelectorAll('.member').length === 1")
    browser.run("document.querySelectorAll('.pick input')[5].click()")
    browser.wait("document.querySelectorAll('.member').length === 2")
    assert len(browser.texts(".chart .mark")) == 4


def test_keys_go_along_the_list_the_episodes_and_the_tokens(
    made_run: Path, browser: Browser
) -> None:
    down, right, escape = "\ue015", "\ue014", "\ue00c"
    open_viewer(browser, page(made_run, "#list?step=2"))
    browser.press(down)
    browser.wait("document.activeElement.className === 'list-row'")
    browser.press(down)
    browser.wait("document.activeElement.dataset.place === '1'")
    browser.press("\n")
    browser.wait("document.documentElement.dataset.shown.includes('episode-2-0-1')")
    browser.press(right)
    browser.wait("location.hash.includes('episode-2-0-2')")
    browser.wait("document.documentElement.dataset.shown.includes('episode-2-0-2')")
    browser.click('.talk span[data-i="0"]')
    browser.press(right)
    browser.wait("location.hash.includes('token=1')")
    browser.press(escape)
    browser.press(escape)
    browser.wait("location.hash.startsWith('#list')")
    browser.press("/")
    assert browser.run("return document.activeElement.id") == "search"


def test_the_command_plays_the_chosen_turn_again(made_run: Path, browser: Browser) -> None:
    open_viewer(browser, page(made_run, "#episode/0/train/1/episode-1-0-1"))
    browser.run(
        "const s = document.querySelector('.again select'); s.value = '2';"
        "s.dispatchEvent(new Event('change'))"
    )
    assert browser.texts(".again code") == [
        f"python scripts/replay.py {made_run} {made_run}/episodes/1.jsonl "
        "--episode episode-1-0-1 --until-turn 2"
    ]


def test_rows_that_begin_with_others_stand_under_them(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, Made(steps=1, groups=1, members=2))
    lines = [json.loads(line) for line in (tmp_path / "episodes/1.jsonl").open()]
    row = lines[0]["rows"][0]
    for parent in (0, 1, 0):
        lines[0]["rows"].append({**row, "parent": {"row": parent, "tokens": 20}})
    lines[1]["rows"].append({**row, "parent": None})
    (tmp_path / "episodes/1.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    make_viewer(tmp_path)
    open_viewer(browser, page(tmp_path, "#episode/0/train/1/episode-1-0-1"))
    assert "none begins with the tokens of another" in browser.texts(".tree .hint")[0]
    show(browser, "#episode/0/train/1/episode-1-0-0")
    assert "begins with tokens of the row above it" in browser.texts(".tree .hint")[0]
    nodes = browser.texts(".tree .node")
    assert [node[:5] for node in nodes] == ["row 0", "row 1", "row 2", "row 3"]
    assert "begins with 20 tokens of row 1" in nodes[2]
    assert len(browser.texts(".tree ul ul ul .node")) == 1
    browser.run("document.querySelectorAll('.tree .node')[3].click()")
    assert browser.run("return document.getElementById('mode').value") == "row 3"


def test_a_missing_data_file_is_said_and_the_rest_is_shown(
    tmp_path: Path, browser: Browser
) -> None:
    make_run(tmp_path, Made(steps=1))
    viewer = make_viewer(tmp_path)
    for file in (viewer / "data/pages").rglob("*.js"):
        file.unlink()
    open_viewer(browser, page(tmp_path, "#episode/0/train/1/episode-1-0-0"))
    assert "missing or damaged" in browser.texts(".fault")[0]
    show(browser, "#list")
    assert len(ids_in_list(browser)) == 16
    show(browser, "#episode/0/train/1/nobody")
    assert "is not in the viewer" in browser.texts(".fault")[0]
    browser.console()


@pytest.fixture(scope="module")
def alone_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of one group, and a validation of one episode: long words and large numbers."""
    folder = tmp_path_factory.mktemp("alone")
    make_run(folder, Made(steps=1, groups=1, members=2, estimator="gae"))
    file = folder / "episodes/1.jsonl"
    lines = [json.loads(line) for line in file.open()]
    call = {"name": "look_up", "arguments": {"word": "fox"}, "ok": False, "error_kind": "timeout"}
    lines[0]["turns"][0]["tool_calls"] = [call]
    lines[0] |= {"ending": "max_turns_reached", "reward": -116234.5}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = {**lines[1], "uid": "alone", "episode_id": "alone", "task": {"seed": 77}}
    (folder / "episodes/val-1.jsonl").write_text(json.dumps(alone) + "\n")
    make_viewer(folder)
    return folder


def test_the_list_cuts_no_number_and_tells_training_from_validation(
    alone_run: Path, browser: Browser
) -> None:
    browser.resize(1300, 900)
    open_viewer(browser, page(alone_run))
    assert browser.texts(".list-row .c-step .tag") == ["train", "train", "val"]
    assert browser.texts(".list-row .c-reward")[0] == "−1.2e5"
    assert browser.texts(".list-row .c-ending")[0] == "max_turns_reached"
    cut = """return [...document.querySelectorAll(".list .cell:not(.c-text)")]
        .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.innerText)"""
    assert browser.run(cut) == []
    browser.click(".facet .bar:nth-child(1)")
    browser.wait("location.hash.includes('kind=train')")
    browser.wait("document.querySelectorAll('.list-row').length === 2")


def titles_by_step(browser: Browser) -> list[str]:
    titles = browser.run("return [...document.querySelectorAll('.column')].map((one) => one.title)")
    return [title for title in titles if title.startswith("step ")]


def test_rewards_by_step_are_of_training_or_of_validation_never_of_both(
    alone_run: Path, browser: Browser
) -> None:
    open_viewer(browser, page(alone_run))
    rows = listed(alone_run / "viewer")
    [title] = titles_by_step(browser)
    assert title.startswith("step 1: mean Reward of training −58")
    open_viewer(browser, page(alone_run, "#list?kind=val"))
    [title] = titles_by_step(browser)
    [reward] = [row["reward"] for row in rows if row["val"]]
    assert title.startswith("step 1: mean Reward of validation ")
    assert float(title.split()[-1].replace("−", "-")) == pytest.approx(reward, rel=0.01)


def test_whether_a_task_is_solved_is_shown_where_tasks_come_again(
    alone_run: Path, tasks_run: Path, browser: Browser
) -> None:
    for run, is_shown in ((alone_run, False), (tasks_run, True)):
        open_viewer(browser, page(run))
        assert any("Their task is" in text for text in browser.texts(".facet")) is is_shown


def test_an_episodes_page_cuts_nothing_and_links_to_nothing_empty(
    alone_run: Path, browser: Browser
) -> None:
    browser.resize(1300, 900)
    open_viewer(browser, page(alone_run, "#episode/0/train/1/episode-1-0-0?color=fate"))
    assert "group" in browser.texts(".episode-head nav")[0]
    assert browser.texts(".call")[0].split() == [
        "tool", "look_up", "failed:", "timeout", "arguments:", '{"word":"fox"}',
    ]  # fmt: skip
    table = "document.querySelector('.turn-table').parentElement"
    assert browser.run(f"return {table}.scrollWidth <= {table}.clientWidth")
    assert browser.run("return document.querySelector('.controls .legend .key') !== null")
    show(browser, "#episode/0/val/1/alone")
    place = browser.texts(".episode-head nav")[0]
    assert "group" not in place and "same task" not in place
