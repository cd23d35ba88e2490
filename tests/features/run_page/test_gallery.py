"""The pictures of the docs: which episode they show, where they stand, how large they are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import gallery
from scripts.browser import Browser
from scripts.gallery import MOST_BYTES, PAGES, PLACE, Picture, Shown

SHOWN = Shown(step=3, uid="a b", episode_id="e#1", token=7)


def write_step(folder: Path, step: int, episodes: list[tuple[str, str, float, int]]) -> None:
    """Writes a step's records: (uid, episode_id, reward, number of turns) an episode."""
    lines = [
        json.dumps({"uid": uid, "episode_id": name, "reward": reward, "turns": [{}] * turns})
        for uid, name, reward, turns in episodes
    ]
    (folder / f"{step}.jsonl").write_text("\n".join(lines))
    # Two tokens a row, of which the second is trained on more.
    np.savez(
        folder / f"{step}.npz",
        episode_id=np.array([name for _, name, _, _ in episodes]),
        episode_row=np.zeros(len(episodes), dtype=int),
        offsets=np.arange(len(episodes) + 1) * 2,
        policy_weight=np.tile([0.1, -0.3], len(episodes)),
    )


def test_the_longest_episode_of_a_group_of_unequal_rewards_is_shown(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [("u", "early", 0.0, 1), ("u", "early2", 1.0, 1)])
    write_step(tmp_path, 2, [("v", "equal", 1.0, 9), ("v", "equal2", 1.0, 9)])
    write_step(tmp_path, 10, [("w", "short", 0.0, 1), ("w", "long", 1.0, 3), ("x", "one", 0.0, 9)])
    (tmp_path / "val-2.jsonl").write_text("not read")
    shown = gallery.shown_episode(tmp_path)
    assert shown == Shown(step=10, uid="w", episode_id="long", token=1)


def test_a_run_that_taught_nothing_is_refused_with_a_sentence(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [("v", "equal", 1.0, 2), ("v", "equal2", 1.0, 2)])
    with pytest.raises(ValueError, match="no step with a group of unequal rewards, in 1 steps"):
        gallery.shown_episode(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_has_a_place_for_each_of_its_pictures_in_their_order(page: Path) -> None:
    if not page.is_file():
        pytest.skip("the folder of this feature was deleted")
    places = [name for name, _ in PLACE.findall(page.read_text())]
    wanted = [picture for picture in gallery.pictures(SHOWN) if picture.shown_on == page]
    assert places == [picture.name for picture in wanted] != []


def test_pictures_are_put_into_the_page_once() -> None:
    page = "before\n\n<!-- picture run: the page -->\n\nafter\n"
    once = gallery.with_pictures(page)
    assert once == (
        "before\n\n<!-- picture run: the page -->\n![the page](img/gallery_run.png)\n\nafter\n"
    )
    assert gallery.with_pictures(once) == once


def test_names_in_an_address_are_quoted() -> None:
    pages = {picture.name: picture.page for picture in gallery.pictures(SHOWN)}
    assert pages["group"] == "viewer/index.html#group/0/train/3/a%20b"
    assert pages["token"].endswith("/3/e%231?row=0&token=7&color=weight")


@pytest.mark.seconds
def test_a_picture_of_noise_is_made_small_enough_or_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, size=(1500, 500, 3), dtype=np.uint8)
    assert len(gallery.compressed(png_of(noise[:500]))) <= MOST_BYTES
    with pytest.raises(ValueError, match=f"above {MOST_BYTES}"):
        gallery.compressed(png_of(noise))


def png_of(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


@pytest.mark.seconds
@pytest.mark.browser
def test_a_picture_shows_the_page_in_light_and_its_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    monkeypatch.setattr(gallery, "PROJECT", tmp_path)
    monkeypatch.setattr(gallery, "SETTLING_SECONDS", 0.1)
    shown_on = tmp_path / "page.md"
    style = "<style>@media (prefers-color-scheme: light) {body {background: #0f0}}</style>"
    (tmp_path / "good.html").write_text(f"{style}<body>words")
    (tmp_path / "bad.html").write_text("<body>words<script>absent()</script>")
    gallery.take(
        browser, tmp_path, Picture(name="good", shown_on=shown_on, page="good.html#list?step=1")
    )
    with pytest.raises(RuntimeError, match=r"bad\.html raised: .*absent is not defined"):
        gallery.take(browser, tmp_path, Picture(name="bad", shown_on=shown_on, page="bad.html"))
    with pytest.raises(FileNotFoundError, match=r"python -m features\.run_page\.report"):
        gallery.take(browser, tmp_path, Picture(name="none", shown_on=shown_on, page="none.html"))
    picture = Image.open(tmp_path / "img/gallery_good.png").convert("RGB")
    assert picture.size == (1400, 900)
    assert picture.getpixel((700, 800)) == (0, 255, 0)
    assert not (tmp_path / "img/gallery_bad.png").exists()
