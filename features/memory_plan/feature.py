"""Plans how much memory a run would take, phase by phase: --plan."""

from training.features import Feature

FEATURE = Feature(
    modes={"--plan": "features.memory_plan.command:plan_command"},
    usage="--plan       print the memory that the run would take, phase by phase; loads no model",
    moved_modules={"contrib.memory_plan": "features.memory_plan"},
)
