"""What went wrong in a run is found from its page by clicks alone, in a real browser.

Each run has one fault, made for real. A test clicks on what is in sight, five times at most, as
somebody does who does not know the fault, until the page says in words what the cause is.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from features.viewer.command import rewrite_page
from scripts.browser import Browser
from tests.conftest import PROJECT
from tests.e2e.test_agents import (
    ACTOR,
    AGENT,
    FORGETFUL,
    GAMES,
    GRPO,
    ROLLOUT,
    fit,
    game_config,
    playing,
    playing_in_turn,
)
from tests.viewer_data import make_viewer
from tests.viewer_pages import SHOWN, open_viewer
from training.run.files import from_here

pytestmark = pytest.mark.browser

STORIES = PROJECT / "tests/features/viewer/runs/story_games.py"
MOST_CLICKS = 5
PATIENCE_S = 5.0


def of_story(name: str) -> tuple[str, ...]:
    return f"{AGENT}.path={STORIES}", f"{AGENT}.cls={name}"


def steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"


def from_step(begins: int, fault: Callable[[Any], None]) -> Callable[[Any], None]:
    """Puts a fault into a trainer at the beginning of a step."""

    def prepare(trainer: Any) -> None:
        train_step = trainer.train_step

        def with_fault(rows: Any) -> dict[str, float]:
            if trainer.global_steps == begins:
                fault(trainer)
            return train_step(rows)

        trainer.train_step = with_fault

    return prepare


class Reader:
    """Somebody who reads a run's page and goes on by clicking on what is in sight."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.clicks: list[str] = []

    def open(self, run_dir: Path) -> None:
        """Opens the run's page, where nothing has been clicked on yet."""
        self.clicks = []
        self.browser.console()
        open_viewer(self.browser, (run_dir / "report.html").as_uri())

    def click(self, words: str, within: str = "body", tag: str = "*") -> None:
        """Clicks on the first element that shows these words, or begins with them."""
        find = """const [words, within, tag] = arguments;
            const fits = [...document.querySelectorAll(`${within} ${tag}`)].filter((node) =>
                node.innerText?.trim().startsWith(words) && node.checkVisibility());
            const found = fits[0] && fits.filter((node) => fits[0].contains(node)).at(-1);"""
        self._press(find, words, within, tag, what=words)

    def click_first(self, selector: str, what: str) -> None:
        """Clicks on the first element of a kind."""
        self._press("const found = document.querySelector(arguments[0]);", selector, what=what)

    def click_point(self, title: str, step: int) -> None:
        """Clicks on a chart of the run's page, at a step; its values are kept, with links."""
        find = "const chart = charts.find((chart) => chart.title === arguments[0]);"
        self.browser.run(f"{find} chart.node.scrollIntoView()", title)
        place = f"{find} return chart.plot && chart.plot.valToPos(arguments[1], 'x')"
        across = self._wait(place, title, step)
        what = f"step {step} of the chart {title!r}"
        self._press(f"{find} const found = chart.plot.over;", title, what=what, across=across)
        self.browser.wait("document.querySelector('.hover.kept') !== null")

    def _press(self, find: str, *arguments: Any, what: str, across: float | None = None) -> None:
        """Clicks in the middle of what a script names `found`, or so many pixels into it."""
        script = f"""{find}
            if (!found || !found.checkVisibility()) return null;
            found.scrollIntoView({{ block: "center" }});
            const box = found.getBoundingClientRect();
            return [box.x, box.y, box.width, box.height]"""
        x, y, width, height = self._wait(script, *arguments)
        sideways = width / 2 if across is None else across
        # The outermost pixels are no part of an element.
        sideways = min(max(sideways, 2), width - 2)
        self.browser.point(x + sideways, y + height / 2, click=True)
        self.clicks.append(what)
        self.browser.wait(SHOWN)

    def _wait(self, script: str, *arguments: Any) -> Any:
        """Waits until a script returns something, and returns it."""
        end = time.monotonic() + PATIENCE_S
        found = self.browser.run(script, *arguments)
        while found is None and time.monotonic() < end:
            time.sleep(0.02)
            found = self.browser.run(script, *arguments)
        assert found is not None, f"after {self.clicks} there is no {arguments} in sight"
        return found

    def number(self, name: str) -> float:
        """Reads a number off the open token's card."""
        find = "return document.querySelector(`.card [data-column='${arguments[0]}']`)?.innerText"
        return float(self._wait(find, name).replace("\u2212", "-"))

    def sees(self, *words: str) -> None:
        """Checks that all of this is in sight now, after few clicks and without a complaint."""
        script = """const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            const parts = [];
            while (walker.nextNode()) {
                if (walker.currentNode.parentElement.checkVisibility()) {
                    parts.push(walker.currentNode.data);
                }
            }
            return parts.join(" ").replace(/\\s+/g, " ")"""
        end = time.monotonic() + PATIENCE_S
        shown = self.browser.run(script)
        while not all(text in shown for text in words) and time.monotonic() < end:
            shown = self.browser.run(script)
        missing = [text for text in words if text not in shown]
        assert not missing, f"after {self.clicks} nobody says {missing}, but: {shown}"
        assert len(self.clicks) <= MOST_CLICKS, self.clicks
        assert self.browser.console() == []


def forgetful(task: Path) -> Path:
    """Copies a game's model, under a template that drops odd guesses from the history."""
    folder = task.parent / "forgetful"
    if not folder.exists():
        shutil.copytree(task / "model", folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = FORGETFUL
        tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def reader(browser: Browser) -> Reader:
    return Reader(browser)


@pytest.fixture
def play(tiny_game: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a run, its viewer, and its page, as the command for the viewer leaves it."""

    def made(
        *settings: str,
        prepare: Callable[[Any], None] = lambda trainer: None,
        task: Path = tiny_game,
    ) -> Path:
        run_dir = tmp_path / "run"
        fit(game_config(task, run_dir, *settings), prepare)
        make_viewer(run_dir)
        return run_dir

    return made


def test_a_reward_bug_that_pays_for_empty_answers(reader: Reader, play: Any) -> None:
    learning = (f"{ACTOR}.optim.lr=1e-2", f"{ROLLOUT}.n=8", steps(4))
    reader.open(play(*GRPO, *of_story("PaysForSilence"), *learning))
    reader.click("without a word, the best paid first", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("reward 1", "answers empty")
    reader.click("side by side", tag="a")
    reader.sees("(empty)", "reward 1")


def test_a_template_that_drops_thinking(reader: Reader, play: Any, tiny_game: Path) -> None:
    """Odd guesses are taken for thinking, and written as `number` once they are history."""
    reader.open(play(*GRPO, "data.max_prompt_length=40", task=forgetful(tiny_game)))
    reader.click_point("Rows of an episode", step=1)
    reader.click("episodes of step 1", within=".hover.kept", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("Its history was rewritten", "number")
    reader.click("row 1:", within=".tree", tag="button")
    reader.sees("Prompt,", "number")


def test_a_group_without_spread(reader: Reader, play: Any) -> None:
    """One of two games pays every answer alike."""
    reader.open(play(*GRPO, *playing_in_turn("Even", "Equal")))
    reader.click_point("Nothing to learn from", step=1)
    reader.click("groups whose scores are equal", within=".hover.kept", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.click_first(".talk span[data-i]", "its first token")
    reader.sees("Every episode of its group has the same score, so its advantage is 0.")
    reader.click("side by side", tag="a")
    reader.sees("no spread: their advantages are 0.")


def test_a_clipped_turn(reader: Reader, play: Any) -> None:
    large = (f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.01")
    reader.open(play(*GRPO, *playing("Steady"), *large))
    reader.click_point("Tokens whose ratio was clipped", step=1)
    reader.click("policy", within=".hover.kept", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.click("clipped", within=".legend-place", tag="span")
    reader.sees("The loss gave it no gradient though it has an advantage: it was clipped.")
    assert abs(reader.number("Probability ratio") - 1) > 0.2


def test_a_stale_engine(reader: Reader, play: Any) -> None:
    seeded_faults = pytest.importorskip("tests.features.alarms.runs.seeded_faults")
    kept = from_step(2, seeded_faults.kept())
    reader.open(play(*GRPO, *playing("Steady"), steps(3), prepare=kept))
    reader.sees("the engine kept its old weights")
    reader.click("the episodes that rang it", within=".alarms", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("Engine's log-prob less the trainer's.")
    reader.click_first(".talk span.n8, .talk span.p8", "a token of the strongest colour")
    assert abs(reader.number("Engine against trainer")) > 0.01
    reader.sees("step 3")


def test_a_game_of_a_mix_that_never_pays(reader: Reader, play: Any) -> None:
    mix = f"env_template=[{{path: {GAMES}, cls: Steady}}, {{path: {STORIES}, cls: NeverPays}}]"
    reader.open(play(*GRPO, f"{AGENT}.path=null", f"{AGENT}.cls=null", mix))
    reader.click_point("Reward of an episode", step=2)
    reader.click("NeverPays", within=".hover.kept", tag="a")
    reader.sees("environment NeverPays", "16 of 64 episodes", "mean 0")
    reader.click_first(".list-row", "the first episode")
    reader.sees("paid what the environment or the reward function gave 0")


def test_a_tool_that_always_fails(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *of_story("BrokenTool")))
    reader.click("calls of look_up that failed", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("look_up", "failed: exception")


def test_overflow_that_pays(reader: Reader, play: Any) -> None:
    pays = ("agent.overflow_reward=2", "agent.max_turn=30", "data.max_response_length=14")
    reader.open(play(*GRPO, *of_story("Endless"), *pays))
    reader.click_point("How episodes ended", step=1)
    reader.click("overflow", within=".hover.kept", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("It overflowed, and agent.overflow_reward added 2 to what it was paid.")


def test_an_answer_that_the_environment_gives_away(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *of_story("TellsItsAnswer"), steps(3)))
    reader.click("the best paid", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("ending")
    talk = " ".join(reader.browser.run("return document.querySelector('.talk').innerText").split())
    facts = r"policy, turn \d+ ?reward 1 ?engine \S+ s ?environment \S+ s"
    assert re.search(rf"user higher (\d+) {facts} \1\b", talk), talk


def test_links_work_once_the_viewer_is_made_and_the_page_says_so_before(
    reader: Reader, tiny_game: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    fit(game_config(tiny_game, run_dir, *GRPO, *playing("Steady"), steps(1)))
    # As where the run ended before it could make one.
    shutil.rmtree(run_dir / "viewer")
    rewrite_page(run_dir)
    reader.open(run_dir)
    python = from_here(Path(sys.executable))
    reader.sees(f"which this command makes: {python} -m features.viewer.command {run_dir}")
    # Nothing but what says so leads to a viewer that is not there.
    links = "return [...document.links].filter((link) => link.href.includes('viewer/')).length"
    assert reader.browser.run(links) == 0
    reader.click_point("Reward of an episode", step=1)
    reader.sees("episodes of step 1 once the viewer is made")
    make_viewer(run_dir)
    # The page that is open knows nothing of it.
    reader.click("episodes of step 1", within=".hover.kept", tag="a")
    reader.sees("32 of 32 episodes")
    reader.open(run_dir)
    assert "which this command makes" not in reader.browser.run("return document.body.innerText")


def test_a_crash_that_was_refilled(reader: Reader, play: Any, tmp_path: Path) -> None:
    (tmp_path / "counts").mkdir()
    flaky = (f"{AGENT}.kwargs.folder={tmp_path}/counts", "agent.on_failure=refill")
    reader.open(play(*GRPO, *playing("Flaky"), *flaky))
    reader.click("crashed and played again", tag="a")
    reader.click_first(".list-row", "the first episode")
    reader.sees("played 2 times")
    reader.click("Attempt 0 failed", tag="summary")
    reader.sees("RuntimeError: out of order")
