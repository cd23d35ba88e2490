"""The page of a run in a real browser: hover, search, links, hostile texts, and nothing loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from features.run_page.report import write_pages
from scripts.browser import Browser
from tests.features.run_page.made_runs import event, make_run, steps

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 20 steps with an alarm, hostile texts, and a viewer."""
    view = "list?step=7&sort=-kl"
    records = steps(
        20, **{"actor/entropy": 1.0, f"agent/info/{HOSTILE}/mean": 2.0, "timing_s/step": 3.0}
    )
    for step in (7, 8):
        records[step - 1]["alarms/kl_jump"] = float(step - 6)
    events = [
        event("start", 0, command=HOSTILE, versions={"python": HOSTILE}),
        event("alarm", 7, name="kl_jump", text=f"alarm kl_jump: {HOSTILE}", view=view),
        event("restart", 8, text=HOSTILE, code=1),
        event("end", 20, exit="failed", text=HOSTILE),
    ]
    folder = make_run(tmp_path / "run", records, events, settings=["data.seed=5"])
    (folder / "viewer").mkdir()
    (folder / "viewer" / "index.html").write_text("<title>the viewer</title>")
    return folder


DRAWN = "document.querySelectorAll('.uplot canvas').length > 0"


def open_page(browser: Browser, run_dir: Path) -> None:
    page, _ = write_pages([run_dir])
    browser.open(page.as_uri())
    browser.wait(DRAWN)


def number_of(browser: Browser, selector: str) -> int:
    found: int = browser.run("return document.querySelectorAll(arguments[0]).length", selector)
    return found


def point_at_chart(browser: Browser, *, click: bool = False) -> None:
    """Moves the mouse a little right of the middle of the first chart."""
    x, y = browser.run(
        "const chart = document.querySelector('.chart .u-over');"
        "chart.scrollIntoView({block: 'center'});"
        "const box = chart.getBoundingClientRect();"
        "return [box.left + box.width / 2 + 3, box.top + box.height / 2 + 5]"
    )
    browser.point(x, y, click=click)


def test_hostile_texts_are_shown_and_not_run_and_nothing_is_loaded(
    browser: Browser, run_dir: Path
) -> None:
    open_page(browser, run_dir)
    assert browser.run("return window.hacked ?? null") is None
    text = browser.run("return document.body.innerText")
    assert text.count(HOSTILE) >= 3
    assert browser.requests() == [(run_dir / "report.html").as_uri()]
    assert browser.console() == []
    # The policy holds: a script that is added is not run.
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        "document.body.append(s)"
    )
    assert browser.run("return window.hacked ?? null") is None


def test_a_hover_shows_the_step_and_its_value(browser: Browser, run_dir: Path) -> None:
    open_page(browser, run_dir)
    point_at_chart(browser)
    shown = browser.run("return document.querySelector('.hover:not([hidden])').innerText")
    step = int(shown.split()[1])
    assert 9 <= step <= 12
    # The mean of five neighbouring steps of a straight line is the line, and what it was.
    assert f"{step / 10:g}" in shown.split()
    # A click keeps it, with a way to the step's episodes.
    point_at_chart(browser, click=True)
    link = browser.run("return document.querySelector('.hover.kept a').href")
    assert link.endswith(f"viewer/index.html#list?step={step}&kind=train&sort=-reward")


def test_any_metric_is_found_by_a_word_and_drawn(browser: Browser, run_dir: Path) -> None:
    open_page(browser, run_dir)
    browser.run("document.querySelector('input[type=search]').focus()")
    browser.press("entropy policy")
    assert browser.texts("button.metric") == ["actor/entropy"]
    before = number_of(browser, ".chart")
    browser.click("button.metric")
    browser.wait("document.querySelector('#metrics .uplot')")
    assert "Mean entropy of the policy at sampled tokens" in browser.texts("#metrics .chart")[0]
    assert number_of(browser, ".chart") == before + 1
    # It is there again when the page is read again.
    browser.run("document.body.remove(); location.reload()")
    browser.wait("document.querySelector('#metrics .chart')")


def test_an_alarm_leads_to_the_tokens_that_rang_it(browser: Browser, run_dir: Path) -> None:
    open_page(browser, run_dir)
    browser.run(
        "[...document.links].find((a) => a.textContent === 'the episodes that rang it').click()"
    )
    browser.wait("document.title === 'the viewer'")
    address = (run_dir / "viewer/index.html").as_uri()
    assert browser.run("return location.href") == f"{address}#list?step=7&sort=-kl"


def test_seeds_stand_on_one_page_as_a_line_with_a_band(browser: Browser, tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        records = [{"step": n, "critic/score/mean": n * seed} for n in range(1, 9)]
        runs.append(make_run(tmp_path / f"run{seed}", records, settings=[f"data.seed={seed}"]))
    page, _ = write_pages(runs)
    browser.open(page.as_uri())
    browser.wait(DRAWN)
    assert "run (2 seeds)" in browser.texts("h1")[0]
    lines = browser.run("return charts[0].lines.map((l) => [l.low[7], l.values[7], l.high[7]])")
    assert lines == [[8, 12, 16]]
    assert browser.console() == []


def test_a_metric_that_one_of_two_runs_has_may_have_any_name(
    browser: Browser, tmp_path: Path
) -> None:
    odd = {"constructor": 1.0, "__proto__": 2.0, "env/toString/reward": 0.5}
    one = make_run(tmp_path / "one", steps(3, **odd), settings=["data.seed=1"])
    other = make_run(tmp_path / "other", steps(3), settings=["alarms.mode=off"])
    page, _ = write_pages([other, one])
    browser.open(page.as_uri())
    browser.wait(DRAWN)
    assert browser.console() == []


def test_nothing_is_wider_than_a_narrow_window(browser: Browser, run_dir: Path) -> None:
    browser.resize(520, 900)
    open_page(browser, run_dir)
    width, window = browser.run(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width <= window


SECTIONS = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic"]
SECTIONS += ["update_actor", "update_weights", "alarms", "save_checkpoint"]


def uneven_run(folder: Path) -> Path:
    """A run of 13 steps with every section of a step, a lone validation, and counts of nothing."""
    timed = {f"timing_s/{name}": 10.0 ** (3 - k) for k, name in enumerate(SECTIONS)}
    timed["timing_s/step"] = 3000.0
    records = steps(13, **timed, **{"agent/failed": 0.0, "agent/retries": 0.0})
    records[6]["val-core/game/reward/mean@1"] = 0.5
    events = [event("start", 0), event("checkpoint", 13), event("end", 13, exit="finished")]
    return make_run(folder, records, events, settings=["data.seed=5"])


def test_axes_end_where_the_run_does_and_charts_of_nothing_are_named_alone(
    browser: Browser, tmp_path: Path
) -> None:
    open_page(browser, uneven_run(tmp_path / "run"))
    ticks = browser.texts(".timeline .axis .track span")
    assert ticks == ["0", "5", "10", "13"]
    find = "const chart = charts.find((chart) => chart.title === arguments[0]);"
    browser.run(f"{find} chart.node.scrollIntoView()", "Reward in validation")
    browser.wait(
        "charts.find((chart) => chart.title === arguments[0]).plot", "Reward in validation"
    )
    scale = f"{find} return [chart.plot.scales.x.min, chart.plot.scales.x.max]"
    assert browser.run(scale, "Reward in validation") == [0, 13]
    titles = browser.run("return charts.map((chart) => chart.title)")
    assert "Failed, retried and masked episodes" not in titles
    assert "0 throughout: Failed, retried and masked episodes." in browser.texts("#charts")[0]


def test_the_parts_of_a_steps_time_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, uneven_run(tmp_path / "run"))
    colors = browser.run(
        "return stackedLines(CONTENT.charts.find((chart) => chart.key === 'step_time'),"
        "CONTENT.groups[0]).map((line) => line.color)"
    )
    assert len(colors) == len(SECTIONS) + 1 == len(set(colors))
    script = """return [...document.querySelectorAll("#time tbody tr")].map((row) =>
        [...row.children].map((cell) => [cell.innerText, getComputedStyle(cell).textAlign]))"""
    rows = browser.run(script)
    for column in zip(*rows, strict=True):
        assert {align for _, align in column} == {"right"}
        assert len({len(text.partition(".")[2]) for text, _ in column}) == 1
    assert rows[0][0][0] == "13" and rows[0][1][0] == "3000"


def test_a_heading_that_is_jumped_to_stands_below_the_bar(browser: Browser, run_dir: Path) -> None:
    open_page(browser, run_dir)
    # The bar has two lines here.
    browser.resize(720, 500)
    browser.wait("document.querySelector('nav').offsetHeight > 50")
    browser.wait("parseFloat(document.documentElement.style.getPropertyValue('--bar-height')) > 50")
    for name in ("timeline", "charts", "alarms"):
        browser.run("document.getElementById(arguments[0]).scrollIntoView()", name)
        bar, heading = browser.run(
            "return [document.querySelector('nav').getBoundingClientRect().bottom,"
            "document.querySelector(`#${arguments[0]} h2`).getBoundingClientRect().top]",
            name,
        )
        assert heading >= bar
