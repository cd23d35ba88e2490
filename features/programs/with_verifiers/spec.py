"""Starts an episode in verifiers' interpreter.

Invariant: the settings go there as one variable in JSON, to the process that loads the environment
and to every episode alike.
"""

import json
from dataclasses import replace
from typing import Any

import torch

from features.programs.opening import program_spec
from features.programs.settings import DRIVER, ProgramsSettings
from features.programs.spec import ProgramSpec
from features.programs.with_verifiers.world import SETTINGS, env_block
from training.config import PPOConfig
from training.config.schema.agent import EnvironmentChoice
from workers.model.builder import ModelSpec

# Turns of all agents of an episode; verifiers counts those of each.
MAX_TURNS = 1_000_000


def verifiers_spec(config: PPOConfig, choice: EnvironmentChoice) -> ProgramSpec:
    """Returns how the episodes of verifiers' environment are started and paid."""
    python = str(config.section(ProgramsSettings).verifiers.python)
    base = program_spec(config, replace(choice, command=(python, str(DRIVER))))
    settings = json.dumps(settings_of(config, choice), sort_keys=True)
    variables = {
        SETTINGS: settings,
        "PYTHONPATH": str(DRIVER.parent),
        # Episodes are forked behind the tokenizer's first use.
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing of them is sent to anyone.
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return replace(
        base,
        name=str(choice.name),
        variables=tuple(sorted(variables.items())),
        preload=(DRIVER.stem, *base.preload),
        reward="stdout",
        max_turn=MAX_TURNS,
        # Paths in its settings are meant from where the run was started.
        has_folder=False,
    )


def settings_of(config: PPOConfig, choice: EnvironmentChoice) -> dict[str, Any]:
    """Returns what the other side needs to know: plain data."""
    verifiers = config.section(ProgramsSettings).verifiers
    model = config.actor_rollout_ref.model
    # Those at which the run's engine stops sampling.
    eos_token_ids = ModelSpec(model, str(model.path), torch.device("cpu")).eos_token_ids
    return {
        "env": env_block(str(choice.name), choice.kwargs),
        "max_turns": choice.max_turn or config.agent.max_turn,
        "tokenizer": model.path,
        "template_kwargs": dict(config.data.apply_chat_template_kwargs),
        "eos_token_ids": eos_token_ids,
        "parser": config.agent.parser,
        "renderer": verifiers.renderer,
        "client": verifiers.client,
        "trained": list(verifiers.trained),
    }
