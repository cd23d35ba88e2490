"""Draws a court as a page: a scatter, credit by turn and by task, and the worst turns.

Invariant: the page is one file that needs nothing else; every text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from features.branching.court import HEADINGS, Court, Judgement, WrongTurn
from features.branching.judged import JudgedBatch
from training.run.files import write_atomically

WORST = 12
MOST_TASKS = 20
MOST_POINTS = 2000
SIZE = 260
MARGIN = 34
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .2em .8em; text-align: right;
  border-bottom: 1px solid #ddd } th:first-child, td:first-child { text-align: left }
.plots { display: flex; flex-wrap: wrap; gap: 1.5em } figure { margin: 0 }
figcaption { font-size: 13px; color: #555 } svg text { font-size: 11px; fill: #555 }
details { margin: .3em 0 } summary { cursor: pointer } .turn { margin-left: 1.5em }
.judged { background: #fff3c4 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 }
  th, td { border-color: #444 } .judged { background: #4a3f10 } svg text, figcaption { fill: #aaa;
  color: #aaa } }
"""


# Returns where an episode is shown at a turn, of its step, name and turn.
Address = Callable[[int, str, int], str]


def write_page(
    path: Path,
    court: Court,
    batches: Sequence[JudgedBatch],
    truth: str,
    address: Address | None = None,
) -> None:
    """Writes the page of a court.

    Args:
        truth: a sentence on which truth was measured.
        address: where, from the page's folder on, an episode is shown; None: nowhere.
    """
    sections = [
        f"<h1>Credit of turns</h1><p>{escape(court.sentence())}</p><p>{escape(truth)}</p>",
        _table(court),
        "<h2>Credit beside what continuations measured, a point a turn</h2>",
        _plots(court, _scatter),
        "<h2>By turn</h2><p>Means over episodes: measured as a line, estimated as dots.</p>",
        _plots(court, _by_turn),
        f"<h2>By task</h2>{_by_task(court)}",
        "<h2>The turns most wrongly credited</h2>",
        _worst_turns(court, batches, address),
    ]
    body = "\n".join(sections)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Credit of turns</title>'
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )
    write_atomically(path, page)


def _table(court: Court) -> str:
    """Writes the judgements as a table."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    rows = []
    for judged in court.judgements:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in judged.cells())
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _plots(court: Court, draw: Callable[[Court, Judgement], str]) -> str:
    """Draws a figure of each estimator."""
    figures = [
        f"<figure>{draw(court, judged)}<figcaption>{escape(judged.estimator)}</figcaption></figure>"
        for judged in court.judgements
    ]
    return f'<div class="plots">{"".join(figures)}</div>'


class _Axis:
    """Places numbers on an axis of SIZE pixels."""

    def __init__(self, numbers: np.ndarray, *, turned: bool = False) -> None:
        self.low = float(min(numbers.min(), 0.0))
        self.high = float(max(numbers.max(), 0.0))
        if self.high == self.low:
            self.high = self.low + 1.0
        self.turned = turned

    def place(self, number: float) -> float:
        """Returns the pixel of a number."""
        share = (number - self.low) / (self.high - self.low)
        if self.turned:
            share = 1 - share
        return MARGIN + share * (SIZE - 2 * MARGIN)


def _frame(across: _Axis, up: _Axis, content: str, labels: tuple[str, str]) -> str:
    """Draws axes through 0 with the ends of both, around what is drawn."""
    zero_x, zero_y = across.place(0.0), up.place(0.0)
    edge = SIZE - MARGIN
    lines = (
        f'<path d="M{MARGIN} {zero_y:.1f}H{edge}M{zero_x:.1f} {MARGIN}V{edge}" stroke="#999" '
        'fill="none"/>'
    )
    texts = (
        f'<text x="{MARGIN}" y="{SIZE - 18}">{across.low:.3g}</text>'
        f'<text x="{edge}" y="{SIZE - 18}" text-anchor="end">{across.high:.3g}</text>'
        f'<text x="2" y="{edge}">{up.low:.3g}</text><text x="2" y="{MARGIN}">{up.high:.3g}</text>'
        f'<text x="{SIZE / 2}" y="{SIZE - 4}" text-anchor="middle">{escape(labels[0])}</text>'
        f'<text x="{MARGIN}" y="14">{escape(labels[1])}</text>'
    )
    return f'<svg width="{SIZE}" height="{SIZE}" role="img">{lines}{content}{texts}</svg>'


def _scatter(court: Court, judged: Judgement) -> str:
    """Draws credit over what was measured."""
    measured = court.turns.measured
    stride = max(1, len(measured) // MOST_POINTS)
    across, up = _Axis(measured), _Axis(judged.credit, turned=True)
    points = "".join(
        f'<circle cx="{across.place(x):.1f}" cy="{up.place(y):.1f}" r="2" fill="#1f77b4" '
        'fill-opacity=".35"/>'
        for x, y in zip(measured[::stride].tolist(), judged.credit[::stride].tolist(), strict=True)
    )
    return _frame(across, up, points, ("measured", "estimated"))


def _by_turn(court: Court, judged: Judgement) -> str:
    """Draws the mean credit of each turn's number, measured and estimated."""
    turn = court.turns.turn
    numbers = np.unique(turn)
    measured = np.array([court.turns.measured[turn == number].mean() for number in numbers])
    given = np.array([judged.credit[turn == number].mean() for number in numbers])
    across = _Axis(numbers.astype(np.float64))
    up = _Axis(np.concatenate([measured, given]), turned=True)
    places = [across.place(float(number)) for number in numbers]
    line = " ".join(
        f"{x:.1f},{up.place(y):.1f}" for x, y in zip(places, measured.tolist(), strict=True)
    )
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{up.place(y):.1f}" r="3" fill="#d62728"/>'
        for x, y in zip(places, given.tolist(), strict=True)
    )
    drawn = f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>{dots}'
    return _frame(across, up, drawn, ("turn", "credit"))


def _by_task(court: Court) -> str:
    """Writes each task's mean squared difference of estimated and measured credit."""
    turns = court.turns
    head = "".join(f"<th>{escape(judged.estimator)}</th>" for judged in court.judgements)
    rows = []
    for number, name in enumerate(turns.group_names[:MOST_TASKS]):
        own = turns.group == number
        cells = "".join(
            f"<td>{np.mean((judged.credit[own] - turns.measured[own]) ** 2):.3g}</td>"
            for judged in court.judgements
        )
        rows.append(f"<tr><td>{escape(name)}</td><td>{own.sum()}</td>{cells}</tr>")
    more = len(turns.group_names) - MOST_TASKS
    note = f"<p>{more} further tasks are not shown.</p>" if more > 0 else ""
    return (
        "<p>Mean squared difference of estimated and measured credit, the noise of the "
        f"continuations included.</p><table><tr><th>task</th><th>turns</th>{head}</tr>"
        f"{''.join(rows)}</table>{note}"
    )


def _worst_turns(court: Court, batches: Sequence[JudgedBatch], address: Address | None) -> str:
    """Writes, for each estimator, the turns that it credited most wrongly, with their episodes."""
    texts: dict[str, list[str]] = {}
    steps: dict[str, int] = {}
    for batch in batches:
        for entry, turns in zip(batch.episodes, batch.texts, strict=True):
            texts[entry["episode_id"]] = turns
            steps[entry["episode_id"]] = batch.step
    parts = []
    for judged in court.judgements:
        items = []
        for wrong in judged.most_wrong(court.turns, WORST):
            said = "".join(
                f'<div class="turn{" judged" if turn == wrong.turn else ""}">'
                f"{turn}: {escape(text)}</div>"
                for turn, text in enumerate(texts.get(wrong.episode, []))
            )
            items.append(
                f"<details><summary>episode {escape(wrong.episode)}, turn {wrong.turn}: estimated "
                f"{wrong.credit:.3g}, measured {wrong.measured:.3g}</summary>{said}"
                f"{_links(steps.get(wrong.episode, 0), wrong, address)}</details>"
            )
        parts.append(f"<h3>{escape(judged.estimator)}</h3>{''.join(items)}")
    return "".join(parts)


def _links(step: int, wrong: WrongTurn, address: Address | None) -> str:
    """Links to the page of a turn's episode, where there is one, and to its record."""
    record = f'<a href="episodes/{step}.jsonl">its record</a>'
    if address is None:
        return record
    page = escape(address(step, wrong.episode, wrong.turn), quote=True)
    return f'<a href="{page}">the episode, with its continuations</a>, {record}'
