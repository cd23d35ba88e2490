"""Charts of a run's page in a real browser: axes, outliers, drags, keys, bars, paper."""

from __future__ import annotations

from typing import Any

import pytest

from features.run_page.report import write_pages
from scripts.browser import Browser
from tests.features.run_page.made_runs import event, make_run

pytestmark = pytest.mark.browser

VALIDATION = "val-core/game/reward/mean@1"
CHART = "charts.find((chart) => chart.title.startsWith(arguments[0]))"


@pytest.fixture(scope="module")
def page_of_spikes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of 200 steps: one exploded gradient, and validations 100 steps apart."""
    records = []
    for step in range(1, 201):
        record: dict[str, Any] = {
            "step": step,
            "critic/score/mean": step / 200,
            "actor/grad_norm": 1 + (step % 7) / 10 + (4000 if step == 120 else 0),
            "actor/lr": 1e-6,
            "agent/env_seconds/mean": 1.0 + step % 3,
            "agent/env_seconds/max": 5.0 + step % 3,
            "timing_s/step": 10.0,
            # It is 0 but for one step: that step is the picture.
            "actor/pg_clipfrac": float(step == 50) / 2,
        }
        if step % 100 == 0:
            mean = step / 400
            record |= {
                VALIDATION: mean,
                f"{VALIDATION}/ci_low": mean - 0.2,
                f"{VALIDATION}/ci_high": mean + 0.2,
            }
        records.append(record)
    folder = make_run(
        tmp_path_factory.mktemp("spikes"), records, [event("start", 0, total_steps=400)]
    )
    page, _ = write_pages([folder])
    return page.as_uri()


def open_page(browser: Browser, page: str) -> None:
    browser.resize(1400, 900)
    browser.open(page)
    browser.wait("document.querySelectorAll('.uplot canvas').length > 0")
    browser.run("charts.forEach((chart) => chart.plot || chart.draw())")


def axis_of(browser: Browser, title: str) -> tuple[float, float]:
    low, high = browser.run(f"const s = {CHART}.plot.scales.y; return [s.min, s.max]", title)
    return low, high


def test_one_exploded_step_is_marked_and_does_not_make_the_axis(
    browser: Browser, page_of_spikes: str
) -> None:
    open_page(browser, page_of_spikes)
    low, high = axis_of(browser, "Norm of the gradient")
    assert low >= 0 and 1.6 <= high < 3
    told = browser.run(f"return {CHART}.beyond.textContent", "Norm of the gradient")
    assert told.startswith("1 value beyond the axis") and "4001" in told
    smooth = "[...p.data].slice(1).flatMap((v) => [...v]).filter((v) => v !== null && v > 2).length"
    script = f"const p = {CHART}.plot; return {smooth}"
    assert browser.run(script, "Norm of the gradient") == 1, "the mean around it is not moved"
    browser.run(f"{CHART}.beyond.querySelector('button').click()", "Norm of the gradient")
    assert axis_of(browser, "Norm of the gradient")[1] > 4000


def test_a_value_beside_nothing_but_equal_ones_is_the_picture(
    browser: Browser, page_of_spikes: str
) -> None:
    open_page(browser, page_of_spikes)
    assert axis_of(browser, "Tokens whose ratio")[1] >= 0.5
    assert browser.run(f"return {CHART}.beyond.hidden", "Tokens whose ratio")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3], [1, 3, 0]),
        ([*range(100)], [0, 99, 0]),
        ([*range(100), 1e9], [0, 99, 1]),
        ([*range(100), -1e9, 1e9], [0, 99, 2]),
        ([0] * 99 + [5], [0, 5, 0]),
        ([*range(10), 1e9], [0, 1e9, 0]),
        ([*range(80)] + [1000 + n for n in range(20)], [0, 1019, 0]),
        ([None, None], [None, None, 0]),
        ([], [None, None, 0]),
    ],
)
def test_an_axis_leaves_out_a_few_values_far_from_the_others(
    browser: Browser, page_of_spikes: str, values: list[float | None], expected: list[float]
) -> None:
    open_page(browser, page_of_spikes)
    script = "const r = robustRange(arguments[0]); return [r.low, r.high, r.beyond]"
    assert browser.run(script, values) == expected


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ([0, 0.5, 1], ["0.0", "0.5", "1.0"]),
        ([0, 0.00025, 0.0005], ["0.0", "2.5e-4", "5.0e-4"]),
        ([0, 500000, 1000000], ["0.0", "0.5e6", "1.0e6"]),
        ([0, 500, 1000, 1500], ["0", "500", "1000", "1500"]),
        ([-0.1, 0, 0.1], ["-0.1", "0.0", "0.1"]),
        ([2.5e6, 2.525e6], ["2.500e6", "2.525e6"]),
        ([None, 1, 2], ["", "1", "2"]),
        ([0], ["0"]),
    ],
)
def test_the_numbers_of_an_axis_have_one_form(
    browser: Browser, page_of_spikes: str, splits: list[float | None], expected: list[str]
) -> None:
    open_page(browser, page_of_spikes)
    assert browser.run("return axisNumbers(arguments[0])", splits) == expected


def test_a_drag_across_zooms_into_steps_everywhere_and_one_down_into_values(
    browser: Browser, page_of_spikes: str
) -> None:
    open_page(browser, page_of_spikes)
    box = "const o = charts[0].plot.over; o.scrollIntoView({block: 'center'});"
    x, y, width, height = browser.run(
        box + "const b = o.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    steps = "return charts[arguments[0]].plot.scales.x"
    before = axis_of(browser, "Reward of an episode")
    other = axis_of(browser, "Norm of the gradient")
    middle = y + height / 2
    browser.drag(x + width / 4, middle, x + width / 2, middle)
    for chart in (0, 1):
        zoomed = browser.run(steps, chart)
        assert 40 < zoomed["min"] < 65 and 90 < zoomed["max"] < 115
    open_page(browser, page_of_spikes)
    browser.run(box)
    x = x + width / 2
    browser.drag(x, y + height / 4, x, y + height / 2)
    low, high = axis_of(browser, "Reward of an episode")
    assert high - low < 0.5 * (before[1] - before[0])
    assert axis_of(browser, "Norm of the gradient") == other
    assert browser.run(steps, 0)["max"] == 200


def test_arrow_keys_go_along_the_steps_and_enter_keeps_the_values(
    browser: Browser, page_of_spikes: str
) -> None:
    right, end, escape, enter = "\ue014", "\ue010", "\ue00c", "\ue007"
    open_page(browser, page_of_spikes)
    browser.run("charts[0].area.focus()")
    browser.press(right)
    shown = "return document.querySelector('.hover:not([hidden])')?.innerText"
    assert browser.run(shown).startswith("step 1\n")
    browser.press(right + right)
    assert browser.run(shown).startswith("step 3\n")
    browser.press(end + enter)
    assert browser.run(shown).startswith("step 200\n")
    assert browser.run("return document.querySelectorAll('.hover.kept').length") == 1
    browser.press(escape)
    assert browser.run(shown) is None


def test_every_canvas_says_in_words_what_it_shows(browser: Browser, page_of_spikes: str) -> None:
    open_page(browser, page_of_spikes)
    script = """return [...document.querySelectorAll('.uplot canvas')].map((canvas) =>
        [canvas.getAttribute('role'), canvas.getAttribute('aria-label')])"""
    canvases = browser.run(script)
    assert all(role == "img" and label for role, label in canvases)
    assert canvases[0][1] == (
        "Reward of an episode, in reward, steps 1 to 200. mean of the step's episodes: 0.005 to 1."
    )


def test_validations_are_points_with_bars_and_no_band(
    browser: Browser, page_of_spikes: str
) -> None:
    open_page(browser, page_of_spikes)
    assert browser.run(f"return {CHART}.plot.bands.length", "Reward in validation") == 0
    low, high = axis_of(browser, "Reward in validation")
    assert low <= 0.05 and high >= 0.7
    # The bar of the first validation is drawn above its point and below it.
    script = f"""const chart = {CHART}; const plot = chart.plot;
        const at = (value) => {{
          const x = plot.valToPos(100, 'x', true); const y = plot.valToPos(value, 'y', true);
          const [red, , blue] = plot.ctx.getImageData(Math.round(x), Math.round(y), 1, 1).data;
          return blue - red;
        }};
        return [at(0.15), at(0.35), at(0.6)].map((blueness) => blueness > 50)"""
    assert browser.run(script, "Reward in validation") == [True, True, False]


def test_the_environments_longest_time_has_a_chart(browser: Browser, page_of_spikes: str) -> None:
    open_page(browser, page_of_spikes)
    labels = browser.run(f"return {CHART}.lines.map((l) => l.label)", "Seconds of an episode")
    assert "in its environment, most" in labels


def test_paper_has_all_charts_and_nothing_that_only_a_pointer_uses(
    browser: Browser, page_of_spikes: str
) -> None:
    browser.resize(1000, 700)
    browser.open(page_of_spikes)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return charts.every((chart) => chart.plot)")
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    try:
        shown = "return document.querySelector(arguments[0]).checkVisibility()"
        assert not browser.run(shown, "nav") and not browser.run(shown, ".tools")
        width, window = browser.run(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert width <= window
    finally:
        light = [{"name": "prefers-color-scheme", "value": "light"}]
        browser.devtools("Emulation.setEmulatedMedia", media="", features=light)
