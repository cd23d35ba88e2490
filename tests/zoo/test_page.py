"""`make zoo`: what it keeps, what it goes on with, and when it fails; the proofs are played."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import page
from tests.zoo.families import FAMILIES, REFUSED, Family
from tests.zoo.own_process import in_own_process
from tests.zoo.page import HF, TRIAL, VLLM
from tests.zoo.proofs import PLAN_TOLERANCE
from tests.zoo.proved_parts import KeptParts, Part

NAMES = ("qwen3", "llama3", "gemma3")


class Played:
    """Stands for the proofs: counts them, and gives what a test wants of a family."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.parts: dict[str, Callable[[], Part]] = {}

    def prove(self, way: str) -> Callable[[Family, Path], Part]:
        """Makes the function that proves in a way."""

        def made(family: Family, folder: Path) -> Part:
            key = f"{family.name}/{way}"
            self.made.append(key)
            return self.parts.get(key, lambda: good(way))()

        return made


def good(way: str) -> Part:
    """Returns a part whose proofs hold."""
    if way == VLLM:
        return Part(cells={"vLLM": "1e-06"})
    if way == TRIAL:
        return Part(refused="it is refused.")
    cells = dict.fromkeys(page.COLUMNS[:-1], "1e-06")
    return Part(model_class="Model", cells=cells)


def bad(way: str) -> Part:
    """Returns a part of which a proof fails."""
    part = good(way)
    column = "vLLM" if way == VLLM else "engine"
    part.cells[column] = "**1e-01**"
    part.failed[column] = "0.1"
    return part


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    proofs = Played()
    nothing_proved = page.Page(versions=page.versions_here())
    text = nothing_proved.write_into(page.PAGE.read_text(encoding="utf-8"))
    monkeypatch.setattr(page, "PAGE", tmp_path / "models.md")
    page.PAGE.write_text(text, encoding="utf-8")
    monkeypatch.setattr(page, "KEPT", tmp_path / "proved.json")
    monkeypatch.setattr(page, "FAMILIES", {name: FAMILIES[name] for name in NAMES})
    monkeypatch.setattr(page, "REFUSED", {"minimax_01": REFUSED["minimax_01"]})
    monkeypatch.setattr(page, "WAYS", {way: proofs.prove(way) for way in (HF, VLLM, TRIAL)})
    monkeypatch.setattr(page.vllm_proofs, "prepare", lambda: None)
    monkeypatch.setattr(page.logging, "disable", lambda level: None)
    monkeypatch.setattr(page, "basis_of_proofs", lambda: "this code")
    return proofs


def row_of(name: str) -> str:
    """Returns a family's line of the page."""
    [line] = [line for line in page.PAGE.read_text().splitlines() if line.startswith(f"| {name} ")]
    return line


ALL = [f"{name}/{way}" for name in NAMES for way in (HF, VLLM)] + ["minimax_01/trial"]


def test_what_was_proved_is_put_into_the_page_and_read_again_as_it_is(played: Played) -> None:
    assert page.main([]) == 0
    assert played.made == ALL
    text = page.PAGE.read_text()
    assert page.Page.read(page.PAGE).write_into(text) == text
    assert "- **minimax_01**: it is refused." in text
    assert page.versions_here() in text


def test_what_somebody_wrote_into_the_page_stays(played: Played) -> None:
    own = "## A section of somebody\n\nOf two paragraphs.\n\nThis is the second."
    text = page.PAGE.read_text()
    page.PAGE.write_text(text.replace("## vLLM\n", f"{own}\n\n## vLLM\n"))
    assert page.main([]) == 0
    assert own in page.PAGE.read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in page.PAGE.read_text().splitlines() if line in headings] == headings


def test_the_page_names_the_limits_of_the_proofs() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for limit in (f"{page.ROW_TOLERANCE:.0e}", f"{page.ENGINE_TOLERANCE:.0e}"):
        assert f"at most {limit}" in text
    assert f"within {PLAN_TOLERANCE:.0%} of what a run takes" in text
    assert f"{page.vllm_proofs.TOLERANCE_OF_TWO_BYTES} on average" in text


def test_a_line_that_is_gone_is_named(played: Played) -> None:
    text = page.PAGE.read_text()
    page.PAGE.write_text(text.replace(page.TRIAL_BEGIN, "By the trial:"))
    with pytest.raises(ValueError, match="has no line that begins with 'By the trial at the start"):
        page.main([])
    assert played.made == []


def test_what_is_kept_is_not_proved_again_unless_one_asks_or_the_code_differs(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.main([])
    text = page.PAGE.read_text()
    played.made.clear()
    assert page.main([]) == 0
    assert (played.made, page.PAGE.read_text()) == ([], text)
    assert page.main(["--again", "llama3"]) == 0
    assert played.made == ["llama3/hf", "llama3/vllm"]
    played.made.clear()
    monkeypatch.setattr(page, "basis_of_proofs", lambda: "other code")
    page.main(["--vllm"])
    assert played.made == [f"{name}/vllm" for name in NAMES]


def test_an_interrupted_run_goes_on_with_what_is_left(played: Played) -> None:
    def interrupt() -> Part:
        raise KeyboardInterrupt

    played.parts["llama3/vllm"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        page.main([])
    assert "qwen3" not in page.Page.read(page.PAGE).rows
    del played.parts["llama3/vllm"]
    played.made.clear()
    assert page.main([]) == 0
    assert played.made == ALL[3:]
    assert all(row_of(name) for name in NAMES)


def test_a_proof_that_fails_ends_with_1_and_is_made_again(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    assert page.main([]) == 0
    played.parts["llama3/hf"] = lambda: bad(HF)
    assert page.main(["--again"]) == 1
    assert "llama3: engine was 1e-06, and is 1e-01" in capsys.readouterr().out
    assert "**1e-01**" in row_of("llama3")
    played.made.clear()
    del played.parts["llama3/hf"]
    assert page.main([]) == 0
    assert played.made == ["llama3/hf"]
    assert "**" not in row_of("llama3")


def test_a_family_that_vllm_played_and_refuses_now_ends_with_1(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Part(cells={"vLLM": "refused"}, refused="it cannot.")
    played.parts["gemma3/vllm"] = lambda: refused
    # Nobody was promised it.
    assert page.main([]) == 0
    assert "- `gemma3`: it cannot." in page.PAGE.read_text()
    del played.parts["gemma3/vllm"]
    assert page.main(["--again", "gemma3"]) == 0
    assert "it cannot." not in page.PAGE.read_text()
    played.parts["gemma3/vllm"] = lambda: refused
    capsys.readouterr()
    assert page.main(["--again", "--vllm"]) == 1
    assert "gemma3: vLLM was 1e-06, and is refused" in capsys.readouterr().out


def test_a_family_that_is_gone_and_one_that_is_refused_no_more_end_with_1(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.main([])
    monkeypatch.setattr(page, "FAMILIES", {name: FAMILIES[name] for name in NAMES[:2]})
    assert page.main([]) == 1
    assert page.main([]) == 0
    played.parts["minimax_01/trial"] = lambda: Part(failed={"refused": "not any more"})
    assert page.main(["--again", "minimax_01"]) == 1


def test_lines_of_other_versions_are_not_mixed(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.main([])
    text = page.PAGE.read_text()
    monkeypatch.setattr(page, "versions_here", lambda: "with torch 9, transformers 9 and vLLM 9")
    page.main(["--again", "qwen3"])
    assert page.PAGE.read_text() == text
    page.main(["--again"])
    assert "with torch 9" in page.PAGE.read_text()


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process was ended by SIGKILL"),
        (lambda: os._exit(3), "its process ended with exit code 3"),
        (lambda: 1 / 0, "division by zero"),
        (lambda: signal.pause(), "its process was not done behind 1 seconds"),
    ],
)
def test_however_a_process_ends_the_caller_goes_on(compute: Any, said: str) -> None:
    answer = in_own_process(compute, limit=1)
    assert (answer.came, answer.said) == (False, said)


def test_a_crash_of_one_family_is_told_and_fails(tmp_path: Path) -> None:
    part = page.with_transformers(FAMILIES["qwen3"], tmp_path / "x" / "\0")
    assert part.failed and part.cells["beside others"] == "**fails**"


def test_parts_of_other_code_are_not_taken(tmp_path: Path) -> None:
    KeptParts(tmp_path / "kept.json", "one").keep("qwen3", HF, good(HF))
    assert KeptParts(tmp_path / "kept.json", "one").get("qwen3", HF) == good(HF)
    assert KeptParts(tmp_path / "kept.json", "other").get("qwen3", HF) is None
