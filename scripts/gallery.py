"""Takes the pictures of the docs from a run's folder: `python scripts/gallery.py RUN_DIR`.

A line `<!-- picture NAME: WHAT IT SHOWS -->` in a page of PAGES is where a picture belongs; the
picture itself is put into the next line. The run page (RUN_DIR/report.html) and the viewer
(RUN_DIR/viewer) are opened in a headless Chromium with a light theme; nothing is trained.

Invariant: a picture is written only if its page raised no error, and takes at most 300 kB.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from scripts.browser import Browser  # noqa: E402
from training.config.loader import load_config  # noqa: E402
from training.features import require_feature  # noqa: E402

require_feature("records", "scripts/gallery.py")

from features.records.settings import RecordsSettings  # noqa: E402

# The pages with pictures; a page's pictures stand in the folder img beside it.
RUN_PAGE = PROJECT / "features" / "run_page" / "README.md"
VIEWER = PROJECT / "features" / "viewer" / "README.md"
PAGES = (RUN_PAGE, VIEWER)
# Where a picture belongs, and the picture that stands there from the time before.
PLACE = re.compile(r"<!-- picture (\w+): (.*) -->\n(?:!\[.*\n)?")
MOST_BYTES = 300_000
# Colours of a picture, fewer where it is too large with more.
PALETTES = (256, 128, 64, 32)
# A page goes on drawing and reading from disk after it has loaded.
SETTLING_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Names a picture's file, the page below the run's folder, and how far down it is looked at."""

    name: str
    #: the page of the docs that shows it
    shown_on: Path
    page: str
    #: JavaScript that is run before the picture is taken
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Names the episode that the pictures show, and the token whose card is open."""

    step: int
    uid: str
    episode_id: str
    token: int


def pictures(shown: Shown) -> list[Picture]:
    """Lists the pictures, in the order of their pages."""
    viewer = "viewer/index.html"
    episode = f"{viewer}#episode/0/train/{shown.step}/{quote(shown.episode_id)}"
    group = f"{viewer}#group/0/train/{shown.step}/{quote(shown.uid)}"
    return [
        Picture(name="run", shown_on=RUN_PAGE, page="report.html"),
        Picture(name="curves", shown_on=RUN_PAGE, page="report.html", script=_scroll_to("charts")),
        Picture(name="time", shown_on=RUN_PAGE, page="report.html", script=_scroll_to("timeline")),
        Picture(name="list", shown_on=VIEWER, page=f"{viewer}#list"),
        Picture(
            name="step",
            shown_on=VIEWER,
            page=f"{viewer}#list?step={shown.step}&sort=reward",
        ),
        Picture(name="episode", shown_on=VIEWER, page=episode),
        Picture(
            name="token",
            shown_on=VIEWER,
            page=f"{episode}?row=0&token={shown.token}&color=weight",
        ),
        Picture(name="group", shown_on=VIEWER, page=group),
    ]


def _scroll_to(section: str) -> str:
    """Writes the script that moves a section of the run page to the window's top.

    It fails where the page has no such section, so that no picture shows another one.
    """
    return f"document.getElementById('{section}').scrollIntoView()"


def shown_episode(episodes: Path) -> Shown:
    """Chooses the episode of most turns in a group of unequal rewards, a third into the run.

    Raises:
        ValueError: no step has such a group, or none was recorded.
    """
    steps = sorted(int(file.stem) for file in episodes.glob("*.jsonl") if file.stem.isdigit())
    for step in steps[len(steps) // 3 :]:
        lines = (episodes / f"{step}.jsonl").read_text().splitlines()
        played = [json.loads(line) for line in lines]
        rewards: dict[str, set[float]] = {}
        for episode in played:
            rewards.setdefault(episode["uid"], set()).add(episode["reward"])
        mixed = [episode for episode in played if len(rewards[episode["uid"]]) > 1]
        if mixed:
            chosen = max(mixed, key=lambda episode: len(episode["turns"]))
            token = _heaviest_token(episodes / f"{step}.npz", chosen["episode_id"])
            return Shown(step=step, uid=chosen["uid"], episode_id=chosen["episode_id"], token=token)
    raise ValueError(
        f"{episodes} holds no step with a group of unequal rewards, in {len(steps)} steps: the "
        "pictures need a run that learned, with records.keep_gib above 0"
    )


def _heaviest_token(arrays: Path, episode_id: str) -> int:
    """Finds the token of the episode's first row that was trained on most: its place in there."""
    with np.load(arrays) as batch:
        rows = np.flatnonzero((batch["episode_id"] == episode_id) & (batch["episode_row"] == 0))
        start, end = batch["offsets"][rows[0]], batch["offsets"][rows[0] + 1]
        return int(np.abs(batch["policy_weight"][start:end]).argmax())


def compressed(png: bytes) -> bytes:
    """Returns a picture as PNG with a palette, of as many colours as MOST_BYTES have room for."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in PALETTES:
        out = io.BytesIO()
        picture.quantize(colors=colours).save(out, format="PNG", optimize=True)
        if len(out.getvalue()) <= MOST_BYTES:
            return out.getvalue()
    raise ValueError(f"a picture takes {len(out.getvalue())} bytes, above {MOST_BYTES}")


def episodes_folder(run: Path) -> Path:
    """Returns where the run wrote its episodes: records.folder, or its own folder."""
    config = load_config([str(run / "config.yaml")], check=False).config
    return config.section(RecordsSettings).folder_of(run)


def take(browser: Browser, run: Path, picture: Picture) -> None:
    """Writes one picture.

    Raises:
        RuntimeError: the page shows nothing, or its script raised an error.
    """
    path, _, rest = picture.page.partition("#")
    file = (run / path).resolve()
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there: python -m features.run_page.report {run} and python -m "
            f"features.viewer.command {run} make the pages"
        )
    browser.open(f"{file.as_uri()}#{rest}" if rest else file.as_uri())
    browser.wait("document.readyState === 'complete' && document.body.innerText.trim() !== ''")
    time.sleep(SETTLING_SECONDS)
    if picture.script:
        browser.run(picture.script)
        time.sleep(SETTLING_SECONDS)
    if errors := browser.errors():
        raise RuntimeError(f"{picture.page} raised: {errors}")
    out = picture.shown_on.parent / "img" / f"gallery_{picture.name}.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(compressed(browser.screenshot()))
    print(f"{out.relative_to(PROJECT)}: {out.stat().st_size / 1000:.0f} kB of {picture.page}")


def with_pictures(page: str) -> str:
    """Returns a page's text with a picture at each of its places."""
    return PLACE.sub(r"<!-- picture \1: \2 -->\n![\2](img/gallery_\1.png)\n", page)


def main(run: Path) -> None:
    """Takes every picture, and puts them into their pages."""
    shown = pictures(shown_episode(episodes_folder(run)))
    pages = [page for page in PAGES if page.is_file()]
    wanted = [picture for picture in shown if picture.shown_on in pages]
    with Browser() as browser:
        for picture in wanted:
            take(browser, run, picture)
    for page in pages:
        page.write_text(with_pictures(page.read_text()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the run's folder: python scripts/gallery.py outputs/smollm2/guess")
    main(Path(sys.argv[1]))
