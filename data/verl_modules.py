"""Knows where verl's modules are here, for files of users that still import them from verl."""

import re
import traceback

# A module of verl, with all below it -> the module here that has its public names.
HERE = {
    "verl": "data.protocol",
    "verl.protocol": "data.protocol",
    "verl.single_controller": "workers.ranks",
    "verl.tools": "custom.tools.verl_tools",
    "verl.trainer.config": "training.config",
    "verl.trainer.ppo.core_algos": "training.core_algos",
    "verl.trainer.ppo.metric_utils": "training.run.metric_utils",
    "verl.trainer.ppo.ray_trainer": "training.ray_trainer",
    "verl.trainer.ppo.reward": "training.reward",
    "verl.trainer.ppo.rollout_corr_helper": "training.rollout_correction",
    "verl.utils.dataset": "data.rl_dataset",
    "verl.utils.reward_score": "custom.reward_score",
    "verl.utils.seqlen_balancing": "training.batch.batching",
    "verl.utils.torch_functional": "training.batch.torch_functional",
    "verl.utils.tracking": "training.run.trackers",
    "verl.workers.actor": "workers.dp_actor",
    "verl.workers.critic": "workers.dp_critic",
    "verl.workers.fsdp_workers": "workers.fsdp_workers",
    "verl.workers.reward_manager": "custom.reward_manager",
    "verl.workers.rollout": "workers.rollout.base_rollout",
}
_IMPORT = re.compile(r"\b(?:from|import)\s+(verl[\w.]*)")


def verl_import_problem(error: ModuleNotFoundError) -> str | None:
    """Returns the sentence for an import of verl, which is not installed; None for any other."""
    if (error.name or "").partition(".")[0] != "verl":
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    match = _IMPORT.search(frame.line or "")
    module = match.group(1) if match else "verl"
    return (
        f"{frame.filename}:{frame.lineno} imports {module}; verl is not installed, and here its "
        f"names are in {module_here(module)}: from {module_here(module)} import …"
    )


def module_here(verl_module: str) -> str:
    """Returns the module here for the longest part of verl's that is known."""
    parts = verl_module.split(".")
    while ".".join(parts) not in HERE:
        parts.pop()
    return HERE[".".join(parts)]
