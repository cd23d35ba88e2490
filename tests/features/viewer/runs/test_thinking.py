"""A turn's thinking is an element of its own in a conversation, in the forms of the families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.browser import Browser
from tests.made_episodes import Made, make_run
from tests.viewer_data import make_viewer
from tests.viewer_pages import open_viewer, show

pytestmark = pytest.mark.browser

# By form: a turn, what of it is thinking, and what is said.
TURNS = {
    "<think>": ("<think>\nhm\n</think>\n\nFive.", ["<think>\nhm\n</think>"], "Five."),
    "opened by the prompt": ("hm\n</think>\n\nFive.", ["hm\n</think>"], "Five."),
    "GLM": ("<think>hm</think>\nFive.", ["<think>hm</think>"], "Five."),
    "cut": ("<think>\nhm", ["<think>\nhm"], ""),
    "Seed": ("<seed:think>hm</seed:think>Five.", ["<seed:think>hm</seed:think>"], "Five."),
    "Magistral": ("[THINK]hm[/THINK]Five.", ["[THINK]hm[/THINK]"], "Five."),
    "Gemma": ("<|channel>thought\nhm<channel|>Five.", ["<|channel>thought\nhm<channel|>"], "Five."),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Five.",
        ["<|channel|>analysis<|message|>hm<|end|>"],
        "Five.",
    ),
    "twice": ("<think>a</think>b<think>c</think>d", ["<think>a</think>", "<think>c</think>"], "d"),
    "none": ("Five.", [], "Five."),
    "said, not closed": ("I wrote think> and Five.", [], "Five."),
}


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("thinking")
    make_run(run, Made(steps=1, groups=len(TURNS), members=1, turns=1))
    path = run / "episodes/1.jsonl"
    episodes = [json.loads(line) for line in path.open()]
    for episode, (text, _, _) in zip(episodes, TURNS.values(), strict=True):
        episode["turns"][0]["text"] = text
    path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    return make_viewer(run)


# Shows turns by their text, as where no token of theirs is there; or cut into tokens of 3 letters.
AS_TEXT = """
  viewer.loaded ||= viewer.loadEpisode;
  viewer.loadEpisode = async (i) => {
    const episode = await viewer.loaded(i);
    const text = episode.turns[0].text;
    const row = episode.rows[0];
    const cuts = text.match(/[^]{1,3}/g);
    const sampled = [...row.columns.turn_ids].map((turn, k) => turn === 0 ? k : -1)
      .filter((k) => k >= 0);
    viewer.tokenText = (_, __, k) => arguments[0]
      ? (sampled.indexOf(k) === sampled.length - 1 ? cuts.slice(sampled.length - 1).join("")
        : cuts[sampled.indexOf(k)] || "") : "";
    if (!arguments[0]) row.columns.turn_ids.fill(-1);
    return episode;
  };
"""
FOLDS = "return [...document.querySelectorAll('details.thinking')]"


@pytest.mark.parametrize("in_tokens", [False, True])
@pytest.mark.parametrize("form", TURNS)
def test_thinking_is_folded_and_named_and_what_is_said_is_not(
    form: str, in_tokens: bool, viewer: Path, browser: Browser
) -> None:
    _, thoughts, said = TURNS[form]
    open_viewer(browser, (viewer / "index.html").as_uri())
    browser.run(AS_TEXT, in_tokens)
    place = list(TURNS).index(form)
    show(browser, browser.run(f"return viewer.episodeAddress({place}, {{}})"))
    assert browser.texts(".fault") == []
    folds = browser.run(f"{FOLDS}.map((fold) => [fold.open, fold.firstChild.textContent])")
    assert folds == [[False, "thinking"]] * len(thoughts)
    shown = browser.run(f"{FOLDS}.map((fold) => fold.lastChild.textContent.replaceAll('↵', ''))")
    if in_tokens:
        # A token that begins in the thinking belongs there.
        for text, thought in zip(shown, thoughts, strict=True):
            assert len(text) - len(thought.replace("\n", "")) in range(-2, 6)
    else:
        assert shown == thoughts
    outside = browser.run(
        "return [...document.querySelectorAll('.bubble.policy > .said')]"
        ".map((block) => block.textContent).join('')"
    )
    assert said.removesuffix(".")[-2:] in outside
    assert "hm" not in outside


def test_a_token_inside_of_thinking_that_is_shown_opens_it(viewer: Path, browser: Browser) -> None:
    open_viewer(browser, (viewer / "index.html").as_uri())
    browser.run(AS_TEXT, True)
    first = browser.run("return viewer.episodeAddress(0, { row: 0, token: 0, as: 'talk' })")
    show(browser, first)
    tokens = browser.run(
        "return [...document.querySelectorAll('details.thinking span[data-i]')]"
        ".map((span) => Number(span.dataset.i))"
    )
    address = f"return viewer.episodeAddress(0, {{ row: 0, token: {tokens[2]}, as: 'talk' }})"
    show(browser, browser.run(address))
    assert browser.run(f"{FOLDS}.map((fold) => fold.open)") == [True]
