"""Tests what sections are made of: frozen, bounded and documented fields, each with a reader."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt

from tests.conftest import PROJECT
from tests.unit.config.helpers import ACTOR, load, problems_of
from training.config import AgentConfig, EnvironmentChoice, PPOConfig
from training.config.leaves import Leaf, anchored, build, field_docs, leaves
from training.config.section import (
    Command,
    InputPath,
    ObjectName,
    OutputPath,
    ParserName,
    Section,
    Threshold,
    ToolName,
)
from training.config.values import as_text
from workers.vllm_rollout_spmd import ALIKE


def test_every_field_is_documented() -> None:
    assert [key for key, leaf in leaves(PPOConfig()) if not leaf.doc] == []
    assert field_docs(PPOConfig).keys() == {"custom_algorithm", "env_template"}


class Documented(Section):
    """A section whose fields are documented in every way there is."""

    behind: int = 1  #: the text behind
    #: the text above,
    #: which goes on
    above: int = 2
    # Only a remark.
    no_doc: int = 3
    in_brackets: tuple[int, ...] = (
        1,
        2,
    )  #: the text behind a bracket


class DocumentedAgain(Documented):
    """A section that documents an inherited field anew."""

    behind: int = 1  #: another text


def test_documentation_stands_behind_a_field_or_on_the_lines_above_it() -> None:
    docs = {
        "behind": "the text behind",
        "above": "the text above, which goes on",
        "in_brackets": "the text behind a bracket",
    }
    assert field_docs(Documented) == docs
    assert field_docs(DocumentedAgain) == docs | {"behind": "another text"}


def test_a_field_without_documentation_is_a_setting_all_the_same() -> None:
    assert dict(leaves(Documented()))["no_doc"] == Leaf(kind=int, value=3, doc="")


def test_a_section_is_built_again_from_its_table() -> None:
    config = load("data.seed=3", f"{ACTOR}.optim.betas=[0.8,0.9]", "critic.model.path=m")
    assert build(PPOConfig(), {key: leaf.value for key, leaf in leaves(config)}) == config


def bounds_of(kind: Any) -> set[Any]:
    """Collects what `Annotated` says of a type, of each X of `X | None` and of a tuple."""
    return {*getattr(kind, "__metadata__", ())} | {
        bound for part in get_args(kind) for bound in bounds_of(part)
    }


def around(bound: Any, step: float) -> tuple[list[Any], list[Any]]:
    """Returns values that keep a bound, and values just outside it."""
    if isinstance(bound, Gt):
        return [bound.gt + step], [bound.gt]
    if isinstance(bound, Ge):
        return [bound.ge], [bound.ge - step]
    if isinstance(bound, Lt):
        return [bound.lt - step], [bound.lt]
    return ([bound.le], [bound.le + step]) if isinstance(bound, Le) else ([-1, 1], [0])


# They change what is given, or find it.
READ = (InputPath, OutputPath, ToolName, ParserName, ObjectName, Command, Threshold)
BOUNDS = [
    (key, leaf, bound)
    for key, leaf in leaves(PPOConfig())
    for bound in sorted(bounds_of(leaf.kind), key=repr)
    if bound not in [reader for kind in READ for reader in kind.__metadata__]
]


@pytest.mark.parametrize(
    ("key", "leaf", "bound"), BOUNDS, ids=[f"{key}-{bound}" for key, _, bound in BOUNDS]
)
def test_a_value_just_outside_its_bound_is_reported_and_one_inside_is_not(
    key: str, leaf: Leaf, bound: Any
) -> None:
    """Says so of what is read, and of what is made in Python, which raises."""
    inside, outside = around(bound, 1 if "int" in str(leaf.kind) else 1e-6)
    pair = leaf.plain is tuple
    section, _, name = key.rpartition(".")
    for value in inside:
        assert load(f"{key}={as_text([value] * 2 if pair else value)}")
    for value in outside:
        problems = problems_of(f"{key}={as_text([value] * 2 if pair else value)}")
        assert problems and all(
            re.match(rf"{re.escape(key)}\S*=.* \(command line\): must be ", p) for p in problems
        )
        with pytest.raises(ValueError, match=name):
            replace(attrgetter(section)(PPOConfig()), **{name: (value, value) if pair else value})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PPOConfig().data.seed = 3  # type: ignore[misc]


def test_estimators_and_losses_written_for_verl_read_fields_by_name() -> None:
    config = load("algorithm.gamma=0.9", f"{ACTOR}.policy_loss.loss_mode=vanilla")
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    assert (algorithm.get("norm_adv_by_std_in_grpo", False), algorithm["gamma"]) == (True, 0.9)
    assert (actor.policy_loss.get("ppo_kl_coef", 0.1), actor.policy_loss["loss_mode"]) == (
        0.1,
        "vanilla",
    )
    assert actor.get("clip_ratio_low", 7) is None and actor.get("micro_batching") is None
    with pytest.raises(KeyError, match="'kl'"):
        algorithm.kl_ctrl["kl"]
    assert all(issubclass(kind, Section) for kind in sections_of(config))


def test_a_section_made_in_python_is_checked_and_reaches_another_process_as_it_is() -> None:
    made = PPOConfig(
        agent=AgentConfig(
            tools=["calculator"], environment=EnvironmentChoice(kwargs={"a": (1, [2])})
        )
    )
    assert pickle.loads(pickle.dumps(made)) == made and made.agent.tools == ("calculator",)
    assert replace(made, agent=AgentConfig()) == PPOConfig()
    with pytest.raises(ValueError, match="max_turns"):
        AgentConfig(max_turns=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="trial_episodes"):
        AgentConfig(trial_episodes="many")  # type: ignore[arg-type]


def test_a_run_keeps_its_files_of_tools_and_names_of_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    (tmp_path / "tools.yaml").touch()
    config = anchored(load("agent.tools=[python,tools.yaml]"))
    assert config.agent.tools == ("python", str(tmp_path / "tools.yaml"))


def sections_of(section: Any) -> list[type]:
    inner = [getattr(section, item.name) for item in fields(section)]
    return [
        type(section),
        *(kind for value in inner if is_dataclass(value) for kind in sections_of(value)),
    ]


@pytest.mark.seconds
def test_every_config_field_has_a_reader() -> None:
    """Counts a field, or a property that derives from fields, as read by `something.name`."""
    folders = ("data", "training", "workers", "custom", "features", "examples")
    files = [
        PROJECT / "main.py",
        *(file for folder in folders for file in (PROJECT / folder).rglob("*.py")),
    ]
    # vLLM is handed those that it has under the same names; both strategies of verl's are FSDP2;
    # a job's script asks for max_requeues.
    unread = {
        name: key
        for key, _ in leaves(PPOConfig())
        if (name := key.split(".")[-1]) not in (*ALIKE, "strategy", "max_requeues")
    }
    for kind in sections_of(PPOConfig()):
        unread |= {
            name: f"{kind.__name__}.{name}"
            for name, value in vars(kind).items()
            if isinstance(value, property)
        }
    for file in files:
        # A check that refuses a value is its reader.
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                unread.pop(node.attr, None)
    assert not unread, f"nothing reads: {', '.join(sorted(unread.values()))}"
