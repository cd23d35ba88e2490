"""Holds the root of the configuration, and what follows from the settings of several sections."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from custom.env_factory import Library, libraries, library_of
from training.config.batch_plan import BatchPlan, UpdatePlan
from training.config.schema.actor import ActorConfig
from training.config.schema.agent import (
    DATASET_ROWS,
    PASSED_AS_OBJECT,
    AgentConfig,
    EnvironmentChoice,
    EnvironmentHome,
    turn_length_problems,
)
from training.config.schema.algorithm import AlgorithmConfig
from training.config.schema.critic import CriticConfig
from training.config.schema.data import DataConfig
from training.config.schema.policy import ActorRolloutRefConfig
from training.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from training.config.schema.rollout import RolloutConfig
from training.config.schema.trainer import RayKwargs, TrainerConfig
from training.config.section import InputPath, Section
from training.core_algos.built_in import estimator_needs
from training.features import FeatureError
from training.features import sections as feature_sections
from workers.rollout.kinds import named_choice

# GiB for a process of an environment whose library runs texts.
GUARDED_MEMORY_GB = 4.0


SectionOf = TypeVar("SectionOf", bound=Section)


class CoreConfig(Section):
    """Holds the settings of one run, those of features apart."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    agent: AgentConfig = AgentConfig()
    #: environments as in agent.environment, or their names, in turn over the agents
    env_template: tuple[EnvironmentChoice, ...] = ()
    #: Python file that registers estimators and losses of your own
    custom_algorithm: InputPath | None = None
    ray_kwargs: RayKwargs = RayKwargs()

    def section(self, kind: type[SectionOf]) -> SectionOf:
        """Returns the section of this class, as a feature asks for its settings.

        Raises:
            LookupError: the config has no such section.
        """
        for value in vars(self).values():
            if type(value) is kind:
                return value
        raise LookupError(f"the config has no section {kind.__name__}: is its feature there?")

    # Estimator, loss and models.

    @property
    def estimator_needs(self) -> tuple[str, ...]:
        """Lists what the estimator reads beside rewards and mask."""
        return estimator_needs(self.algorithm.adv_estimator)

    @property
    def need_values(self) -> bool:
        """Returns critic.enable where it is set, else whether the estimator reads values."""
        if self.critic.enable is not None:
            return self.critic.enable
        return "values" in self.estimator_needs

    @property
    def need_critic(self) -> bool:
        """Returns whether a model of its own gives the values."""
        return self.need_values and not self.critic.share_backbone

    @property
    def need_reference(self) -> bool:
        """Returns whether loss, reward or estimator read log-probs of the reference policy."""
        uses_kl = self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return uses_kl or "ref_log_prob" in self.estimator_needs

    @property
    def loss_mode(self) -> str:
        """Names the policy loss in force."""
        if self.algorithm.rollout_correction.bypass_mode:
            return "bypass_mode"
        return self.actor_rollout_ref.actor.policy_loss.loss_mode

    @property
    def with_correction(self) -> Self:
        """Returns the config with `rollout_is` decided: off becomes null.

        By default what older weights sampled is weighed by token.
        """
        correction = self.algorithm.rollout_correction
        corrects = correction.corrects or correction.bypass_mode
        weighs_by_default = self.trainer.async_level > 0 and not corrects
        if weighs_by_default:
            correction = replace(correction, rollout_is="token")
        elif correction.rollout_is == "off":
            correction = replace(correction, rollout_is=None)
        else:
            return self
        return replace(self, algorithm=replace(self.algorithm, rollout_correction=correction))

    # Environments.

    @property
    def environments(self) -> tuple[EnvironmentChoice, ...]:
        """Lists what the agents act in, in turn; empty where training is on prompts."""
        if self.env_template:
            return self.env_template
        choice = named_choice(self)
        return () if choice is None else (choice,)

    @property
    def acting_in_given(self) -> Self:
        """Returns the config of agents that a program gives, where it names no environment."""
        if self.environments and not self.plays_dataset_rows:
            return self
        given = replace(self.agent.environment, name=PASSED_AS_OBJECT)
        return replace(self, agent=replace(self.agent, environment=given))

    @property
    def plays_dataset_rows(self) -> bool:
        """Returns whether rows are played with tools, without an environment that is named.

        Their rewards are those of prompts: a reward manager's.
        """
        if self.env_template or self.agent.environment.is_set:
            return False
        return [choice.name for choice in self.environments] == [DATASET_ROWS]

    @property
    def environment_home(self) -> EnvironmentHome:
        """Returns where environments live; what is left open follows from their libraries."""
        settings = self.agent.environment
        guarded = self._guarded_libraries
        network = settings.network
        if network is None:
            network = all(library.network for library in guarded)
        return EnvironmentHome(
            isolation=settings.isolation or ("process" if guarded else "thread"),
            num_workers=settings.num_workers,
            network=network,
            memory_gb=settings.memory_gb or (GUARDED_MEMORY_GB if guarded else None),
        )

    @property
    def _guarded_libraries(self) -> list[Library]:
        """Lists the environments' libraries that are kept in processes of their own."""
        names = [library_of(environment.name) for environment in self.environments]
        used = [libraries()[name] for name in names if name]
        return [library for library in used if library.own_process]

    # Sizes of a step.

    @property
    def prompts_per_step(self) -> int:
        """Counts the prompts, or episodes, of a step before each is repeated."""
        if self.environments and self.agent.agent_length:
            return self.agent.agent_length
        return self.data.train_batch_size

    @property
    def data_parallel_size(self) -> int:
        """Counts the groups of ranks that train on rows of their own.

        The ranks of a group share each sequence.
        """
        ranks_per_sequence = self.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        return self.trainer.num_ranks // ranks_per_sequence

    @property
    def batch_plan(self) -> BatchPlan:
        """Plans how a step's batch is cut; without a critic its part follows the actor's."""
        actor = self.actor_rollout_ref.actor
        critic = self.resolved_critic if self.need_critic else actor
        return BatchPlan(
            prompts=self.prompts_per_step,
            ranks=self.data_parallel_size,
            balance=self.trainer.balance_batch,
            actor=self._update_plan(actor),
            critic=self._update_plan(critic),
        )

    def _update_plan(self, model: ActorConfig | CriticConfig) -> UpdatePlan:
        """Plans the updates of one model; the prompts of a step are its rows here."""
        prompts = self.prompts_per_step
        return UpdatePlan.of_rows(
            prompts,
            model.ppo_mini_batch_size or prompts,
            model.ppo_epochs or 1,
            model.shuffle,
        )

    @property
    def max_model_len(self) -> int:
        """Returns the tokens of the longest row that the rollout engine must hold."""
        return self.actor_rollout_ref.rollout.max_model_len or self.data.row_length

    # Sections with what they take over from others.

    @property
    def replays_routing(self) -> bool:
        """Returns whether the policy computes with the experts that the engine chose."""
        return self.actor_rollout_ref.actor.router_replay.mode == "R3"

    @property
    def resolved_rollout(self) -> RolloutConfig:
        """Returns the rollout's section with what it takes over from the data section filled in."""
        rollout = self.actor_rollout_ref.rollout
        sleeps = rollout.free_cache_engine and not self.trainer.rollout_n_gpus
        return replace(
            rollout,
            response_length=rollout.response_length or self.data.max_response_length,
            max_model_len=self.max_model_len,
            free_cache_engine=sleeps,
            enable_rollout_routing_replay=self.replays_routing,
        )

    @property
    def resolved_critic(self) -> CriticConfig:
        """Returns the critic's section with what it takes over from the actor filled in."""
        critic = self.critic
        model = self.actor_rollout_ref.model
        actor = self.actor_rollout_ref.actor
        return replace(
            critic,
            model=replace(critic.model, path=critic.model.path or model.path),
            ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
            ulysses_sequence_parallel_size=(
                critic.ulysses_sequence_parallel_size or actor.ulysses_sequence_parallel_size
            ),
        )

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with `env_template`; the sections have problems of their own."""
        if self.env_template and self.agent.environment.is_set:
            yield "env_template and agent.environment both name environments: give one of them"
        for name in EnvironmentHome._fields:
            if any(entry[name] is not None for entry in self.env_template):
                yield (
                    f"env_template: {name} is one for all environments: set "
                    f"agent.environment.{name}"
                )
        for number, entry in enumerate(self.env_template):
            yield from turn_length_problems(
                f"env_template[{number}]", entry.max_turn_tokens, self.data.max_response_length
            )


if TYPE_CHECKING:

    class PPOConfig(CoreConfig):
        """Holds the settings of one run."""

else:

    def _default_of(feature: str, kind: Any) -> Section:
        """Makes a feature's section of its defaults; FeatureError where there is none."""
        if not isinstance(kind, type) or not issubclass(kind, Section):
            raise FeatureError(
                f"features/{feature}/feature.py: section={kind!r} is no class of "
                "training.config.section.Section; give one, or take the folder away"
            )
        try:
            made = kind()
            # A default is not validated before it is given.
            return kind(**{setting.name: made[setting.name] for setting in fields(made)})
        # pydantic has several kinds of errors.
        except Exception as error:
            lines = " ".join(str(error).partition("For further information")[0].split())
            raise FeatureError(
                f"features/{feature}: {kind.__name__} ({kind.__module__}) cannot be made of its "
                f"defaults: {lines}; every setting has a default of its type; mend it, or take the "
                "folder away"
            ) from error

    def _with_features() -> type[CoreConfig]:
        """Makes the class of all settings: the core's, and a section for each feature."""
        kinds = feature_sections()
        for name in kinds:
            if hasattr(CoreConfig, name):
                raise FeatureError(
                    f"features/{name} has settings, and the config has a {name!r} of its own: give "
                    "the folder another name"
                )
        defaults = {name: _default_of(name, kind) for name, kind in kinds.items()}
        body = {"__doc__": "Holds the settings of one run.", "__module__": __name__}
        return type("PPOConfig", (CoreConfig,), {**defaults, **body, "__annotations__": kinds})

    PPOConfig = _with_features()
