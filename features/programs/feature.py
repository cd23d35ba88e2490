"""Programs that play by themselves, as commands or functions; and verifiers' environments."""

from features.programs.settings import ProgramsSettings
from training.features import Feature

FEATURE = Feature(
    section=ProgramsSettings,
    moved_keys={
        "agent.command": "programs.command",
        "agent.program": "programs.function",
        "agent.preload": "programs.preload",
        "agent.program_reward": "programs.reward",
        "agent.client_sampling": "programs.client_sampling",
        "agent.program_host": "programs.host",
        "agent.request_timeout_s": "programs.request_timeout_s",
        "agent.verifiers": "programs.verifiers",
    },
    moved_modules={
        "workers.programs": "features.programs",
        "workers.programs.mixed_pool": "workers.rollout.mixed_pool",
        "training.config.schema.verifiers": "features.programs.settings",
        "training.program_trial": "features.programs.trial",
        "training.serve": "features.programs.serve",
    },
    checks="features.programs.checks:config_problems",
    modes={"--serve": "features.programs.serve:serve_command"},
    model_options=("--serve",),
    # Verifiers' first: where it has an interpreter of its own, its environments are programs.
    kinds=("features.programs.kind:VERIFIERS", "features.programs.kind:PROGRAM"),
)
