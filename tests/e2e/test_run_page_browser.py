"""The page of a run in a real browser: hover, search, links, hostile texts, and nothing loaded."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.page.made_runs import event, make_run, steps
from training.run.report import write_pages

pytestmark = pytest.mark.browser

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,900",
)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("there is no chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


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


def open_page(driver: Any, run_dir: Path) -> None:
    page, _ = write_pages([run_dir])
    driver.get_log("browser")
    driver.get_log("performance")
    driver.get("about:blank")
    driver.get(f"file://{page}")
    wait(driver, "return document.querySelectorAll('.uplot canvas').length > 0")


def wait(driver: Any, script: str) -> Any:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = driver.execute_script(script)
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(script)


def test_hostile_texts_are_shown_and_not_run_and_nothing_is_loaded(
    driver: Any, run_dir: Path
) -> None:
    open_page(driver, run_dir)
    assert driver.execute_script("return window.hacked") is None
    text = driver.find_element("tag name", "body").text
    assert text.count(HOSTILE) >= 3
    asked = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert asked == [f"file://{run_dir}/report.html"]
    assert driver.get_log("browser") == []
    # The policy holds: a script that is added is not run.
    driver.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        "document.body.append(s)"
    )
    assert driver.execute_script("return window.hacked") is None


def test_a_hover_shows_the_step_and_its_value(driver: Any, run_dir: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(driver, run_dir)
    chart = driver.find_element("css selector", ".chart .u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(driver).move_to_element_with_offset(chart, 3, 5).perform()
    shown = driver.execute_script("return document.querySelector('.hover:not([hidden])').innerText")
    step = int(shown.split()[1])
    assert 9 <= step <= 12
    # The mean of five neighbouring steps of a straight line is the line, and what it was.
    assert f"{step / 10:g}" in shown.split()
    # A click keeps it, with a way to the step's episodes.
    ActionChains(driver).move_to_element_with_offset(chart, 3, 5).click().perform()
    link = driver.find_element("css selector", ".hover.kept a").get_attribute("href")
    assert link.endswith(f"viewer/index.html#list?step={step}&kind=train&sort=-reward")


def test_any_metric_is_found_by_a_word_and_drawn(driver: Any, run_dir: Path) -> None:
    open_page(driver, run_dir)
    search = driver.find_element("css selector", "input[type=search]")
    search.send_keys("entropy policy")
    names = driver.execute_script(
        "return [...document.querySelectorAll('button.metric')].map((b) => b.textContent)"
    )
    assert names == ["actor/entropy"]
    before = len(driver.find_elements("css selector", ".chart"))
    driver.execute_script("document.querySelector('button.metric').click()")
    wait(driver, "return document.querySelector('#metrics .uplot')")
    chart = driver.find_element("css selector", "#metrics .chart")
    assert "Mean entropy of the policy at sampled tokens" in chart.text
    assert len(driver.find_elements("css selector", ".chart")) == before + 1
    # It is there again when the page is read again.
    driver.refresh()
    wait(driver, "return document.querySelector('#metrics .chart')")


def test_an_alarm_leads_to_the_tokens_that_rang_it(driver: Any, run_dir: Path) -> None:
    open_page(driver, run_dir)
    link = driver.find_element("link text", "the tokens that rang it")
    link.click()
    assert driver.title == "the viewer"
    assert driver.current_url == f"file://{run_dir}/viewer/index.html#list?step=7&sort=-kl"


def test_seeds_stand_on_one_page_as_a_line_with_a_band(driver: Any, tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        records = [{"step": n, "critic/score/mean": n * seed} for n in range(1, 9)]
        runs.append(make_run(tmp_path / f"run{seed}", records, settings=[f"data.seed={seed}"]))
    page, _ = write_pages(runs)
    driver.get_log("browser")
    driver.get(f"file://{page}")
    wait(driver, "return document.querySelectorAll('.uplot canvas').length > 0")
    assert "run (2 seeds)" in driver.find_element("tag name", "h1").text
    lines = driver.execute_script(
        "return charts[0].lines.map((l) => [l.low[7], l.values[7], l.high[7]])"
    )
    assert lines == [[8, 12, 16]]
    assert driver.get_log("browser") == []


def test_nothing_is_wider_than_a_narrow_window(driver: Any, run_dir: Path) -> None:
    driver.set_window_size(520, 900)
    try:
        open_page(driver, run_dir)
        width, window = driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert width <= window
    finally:
        driver.set_window_size(1400, 900)
