"""What a model or an environment says is text on every page, whatever it says."""

from __future__ import annotations

import functools
import http.server
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.browser import Browser
from tests.made_episodes import Made, make_run
from tests.viewer_data import listed, make_viewer
from tests.viewer_pages import open_viewer, show

pytestmark = pytest.mark.browser
HIT = "window.hit = 1"
HOSTILE = (
    f"</script><script>{HIT}</script>",
    f"<img src=x onerror='{HIT}'><svg onload='{HIT}'>",
    f'"><iframe srcdoc="<script>parent.{HIT}</script>"></iframe>',
    f"javascript:{HIT}",
    "<style>*{display:none}</style><base href='http://evil.example/'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "<link rel=stylesheet href='http://evil.example/a.css'><img src='http://evil.example/a.png'>",
    "\u202eevil\u202c \u2066isolate\u2069 \u200b\u200f",
    "nul \x00 bell \x07 escape \x1b[31m delete \x7f",
    "lone \ud800 surrogate \udfff",
    "line \u2028 paragraph \u2029",
    "W" * 100_000,
    "Z" + "\u0301\u0489" * 200,
    "${hit} {{hit}} `${window.hit=1}`",
    "__proto__",
    "constructor",
)


def hostile_records(run: Path) -> None:
    """Puts a hostile text into every entry of an episode that is text."""
    make_run(run, Made(steps=1, groups=len(HOSTILE), members=2))
    path = run / "episodes/1.jsonl"
    episodes = [json.loads(line) for line in path.open()]
    for number, episode in enumerate(episodes):
        text = HOSTILE[number // 2]
        for entry in ("data_source", "environment", "ending", "error"):
            episode[entry] = text
        episode["task"] = {text: text}
        episode["info"] = {text: 1.0}
        episode["tool_calls"] = [{"name": text[:2000], "arguments": text[:2000]}]
        episode["initial_messages"] = [{"role": text, "content": text}]
        for turn in episode["turns"]:
            turn["text"] = text
            turn["tool_calls"] = [{"name": text[:2000]}]
            turn["info"] = {text: text}
            turn["finish_reason"] = text
            turn["observation"] = [{"role": text, "content": [{"type": text, "text": text}]}]
        episode["failed_attempts"] = [
            {"turns": [{"text": text}], "ending": text, "error": text},
        ]
        if number % 2:
            episode["episode_id"] = f"{text[:300]}/{number}?a=b&c#d"
            episode["uid"] = text[:300]
            episode["rows"][0]["parent"] = {"row": text, "tokens": text}
    path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile_records(folder)
    return make_viewer(folder)


@pytest.fixture(params=["file", "http"])
def address(request: pytest.FixtureRequest, hostile: Path) -> Iterator[str]:
    """The page's address on the disk, and at a server."""
    if request.param == "file":
        yield (hostile / "index.html").as_uri()
        return
    handler = functools.partial(QuietHandler, directory=str(hostile))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Says nothing."""


# The pages of all episodes, groups and tasks, as the list links to them.
PLACES = """
  const places = ["#list", "#list?sort=-reward"];
  for (let i = 0; i < viewer.table.size; i += 1) {
    places.push(viewer.episodeAddress(i, { color: "fate", row: 0, token: 2 }));
    if (i % 2) places.push(viewer.groupAddress(i), viewer.taskAddress(i));
  }
  return places;
"""


def test_no_script_runs_nothing_is_asked_for_and_all_is_text(
    hostile: Path, address: str, browser: Browser
) -> None:
    browser.requests()
    browser.console()
    open_viewer(browser, address)
    odd = [
        "#constructor",
        "#list?constructor=1&__proto__=2&sort=constructor",
        "#list?fate=__proto__",
    ]
    for place in [*browser.run(PLACES), *odd]:
        show(browser, place)
        assert browser.texts(".fault") == [], place
        for element in ("img", "iframe", "base", "object", "embed", "form"):
            assert browser.texts(element) == []
    assert browser.run("return window.hit") is None
    assert browser.run("return [...document.scripts].every((s) => s.src && !s.text)")
    folder = address.removesuffix("index.html")
    assert [url for url in browser.requests() if not url.startswith((folder, "about:"))] == []
    assert [line for line in browser.console() if "favicon" not in line] == []


def test_what_cannot_be_seen_is_shown_as_a_sign(hostile: Path, browser: Browser) -> None:
    open_viewer(browser, (hostile / "index.html").as_uri())
    expected = {
        7: ("⟨RLO⟩evil⟨PDF⟩", "⟨LRI⟩isolate⟨PDI⟩", "⟨ZWSP⟩⟨RLM⟩"),
        8: ("nul ⟨NUL⟩ bell ⟨BEL⟩", "⟨ESC⟩[31m", "⟨DEL⟩"),
        9: ("lone ⟨U+D800⟩ surrogate ⟨U+DFFF⟩",),
        10: ("⟨LS⟩", "⟨PS⟩"),
        12: ("marks⟩",),
        0: (HOSTILE[0],),
    }
    for group, signs in expected.items():
        show(browser, f"#episode/0/train/1/episode-1-{group}-0")
        text = browser.texts("main")[0]
        for sign in signs:
            assert sign in text
        assert not any(ord(character) in (0x202E, 0x200B, 0x2066, 0) for character in text)


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_wider_than_the_page(hostile: Path, browser: Browser, width: int) -> None:
    browser.resize(width, 800)
    open_viewer(browser, (hostile / "index.html").as_uri())
    for group in range(len(HOSTILE)):
        for place in (f"#episode/0/train/1/episode-1-{group}-0", "#list"):
            show(browser, place)
            script = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.run(script) <= 0, place


def test_a_command_never_holds_what_cannot_be_seen(hostile: Path, browser: Browser) -> None:
    open_viewer(browser, (hostile / "index.html").as_uri())
    commands = []
    for place in browser.run(PLACES):
        if place.startswith("#episode"):
            show(browser, place)
            commands += browser.texts(".again code")
    assert commands
    ids = [row["id"] for row in listed(hostile)]
    for command in commands:
        assert command.isprintable()
        assert command.startswith(("python scripts/replay.py", "# its id"))
        if command.startswith("python"):
            words = shlex.split(command)
            assert words[-4] == "--episode" and words[-3] in ids
