"""Lists the modules of the API reference, by the page that shows them.

A page is a title, a sentence and, for each module, the line by which mkdocstrings puts its
docstring and its public names there. Invariant: a module stands on one page.
"""

from __future__ import annotations

# The title of each page, and what a reader does with it.
TITLES = {
    "environments": ("Environments", "What you write to play a game, a task or a dataset's rows."),
    "agents": ("Agents and episodes", "A conversation around an environment, and its record."),
    "tools": ("Tools", "What an agent may call, and how its calls are read from its text."),
    "rewards": ("Rewards", "Scores of answers: rules by data source, managers, your function."),
    "advantages": ("Advantages", "Estimators by name, and how to register one of your own."),
    "losses": ("Losses and KL", "Policy losses, the critic's loss, the KL, and how they average."),
    "dataproto": ("DataProto", "The batch that goes through a step, and its fields."),
    "trainers": ("Trainers", "A run and its step, from a configuration."),
    "engines": ("Engines", "What a rollout engine is, and how to add one."),
    "features": (
        "Observers, probes, features",
        "What hangs on the core; the guides are [observers.md](../observers.md) and "
        "[features.md](../features.md).",
    ),
    "setup": ("The package setup", "The Python API; its guide is [python.md](../python.md)."),
}
API_PAGES: dict[str, tuple[str, ...]] = {
    "environments": ("custom.env", "custom.env_suite", "custom.env_dataset"),
    "agents": (
        "custom.agent",
        "workers.rollout.episode",
        "workers.agent_rollout",
        "workers.multi_turn_rollout",
    ),
    "tools": (
        "custom.tools.definition",
        "custom.tools.calls",
        "custom.tools.parsers",
        "custom.tools.registry",
        "custom.tools.turns",
        "custom.tools.loading",
        "custom.tools.verl_tools",
    ),
    "rewards": (
        "training.reward",
        "custom.reward_score",
        "custom.reward_managers.registry",
        "custom.reward_managers.naive",
        "custom.reward_managers.batch",
        "custom.reward_managers.prime",
        "custom.reward_managers.environment",
    ),
    "advantages": (
        "training.core_algos.registry",
        "training.core_algos.token_advantages",
        "training.core_algos.turn_advantages",
        "training.core_algos.group_advantages",
        "training.core_algos.optimal_token_baseline",
        "training.core_algos.estimator_settings",
        "training.core_algos.pf_ppo",
        "training.batch.policy_filtration",
        "training.advantage",
    ),
    "losses": (
        "training.core_algos.policy_losses",
        "training.core_algos.covariance_losses",
        "training.core_algos.loss_inputs",
        "training.core_algos.loss_settings",
        "training.core_algos.verl_form",
        "training.core_algos.aggregation",
        "training.core_algos.kl",
        "training.core_algos.value_loss",
    ),
    "dataproto": ("data.protocol",),
    "trainers": (
        "training.ray_trainer",
        "training.agent_trainer",
        "training.building",
        "training.config.loader",
    ),
    "engines": (
        "workers.rollout.engine",
        "workers.rollout.base_rollout",
        "workers.rollout.engine_registry",
    ),
    "features": (
        "training.observers",
        "training.features",
        "workers.model.probe",
        "workers.rollout.keepers",
        "workers.rollout.kinds",
        "training.config.section",
        "training.config.translator",
        "custom.side_services",
    ),
    "setup": (
        "setup.config_store",
        "setup.config_sections",
        "setup.trainer",
        "setup.rollout_data",
        "setup.engines",
        "setup.multi_turn",
        "setup.ppo_batch",
        "setup.algo",
    ),
}


def api_page(name: str, modules: tuple[str, ...]) -> str:
    """Writes the page of these modules."""
    title, sentence = TITLES[name]
    return "\n\n".join([f"# {title}", sentence, *(f"::: {module}" for module in modules)]) + "\n"
