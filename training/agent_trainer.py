"""AgentTrainer: the same step as RayPPOTrainer's, with episodes in an environment instead of answers to prompts.

A step plays `agent.agent_length` x `rollout.n` fresh episodes; the environment gives the rewards. Without a dataset an
epoch is one step; the rows of one are the environment's tasks, `reset(seed, **row)`. Invariant: what an episode faces
follows from (run seed, step, number in the step), so that a resumed run meets what it would have met.

Before any model is loaded environments are tried: do they start, and does play pay more than not playing? What is wrong
with any of them is reported together, in the list of problems of the configuration.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from custom.agent import AgentSpec, Trial
from custom.env import Task
from custom.env_suite import EnvironmentSuite
from data.containers import object_array
from data.loading import load_extern_object
from data.protocol import DataProto
from data.texts import say
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from training.config.loader import ConfigError, read_config
from training.config.section import anchored
from training.config.settings import GIVEN
from training.ray_trainer import Collate, RayPPOTrainer, Rows
from training.run.metric_utils import (
    FailureWatch,
    StepTimer,
    episode_metrics,
    require_same_tasks,
    write_episodes,
)
from training.run.roles import ResourcePoolManager, Role
from workers.environments.env_server import StepReply
from workers.environments.pool import CannotBuild, EnvironmentPool, environment_name
from workers.multi_turn_rollout import (
    SyncMultiTurnRollout,
    agent_specs,
    describe_episodes,
    open_pool,
)

logger = logging.getLogger(__name__)
CLOSING_S = 15.0  # for the environments to be closed at a run's end


def environment_rewards(data: DataProto) -> Tensor:
    """Returns what the environments gave, (B, R), each reward on the last sampled token of its turn."""
    data.require("environment_rewards", by="environment_rewards")
    return data.batch["environment_rewards"]


class AgentTrainer(RayPPOTrainer):
    """Trains by PPO and its relatives on episodes.

    Args:
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one around the environment.
        specs: how agents are built, one for each environment; None: as the config says.
        reward_fn, val_reward_fn: None: what the environment, or `custom_reward_function`, gave.
        The rest as RayPPOTrainer's.
    """

    def __init__(
        self,
        config: PPOConfig | Any,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        agent_cls: type | None = None,
        *,
        specs: Sequence[AgentSpec] | None = None,
        **kwargs: Any,
    ) -> None:
        config = anchored(read_config(config, own_data=True)).with_correction
        if not config.environments and (specs or agent_cls):
            environment = replace(config.agent.environment, name=GIVEN)
            config = replace(config, agent=replace(config.agent, environment=environment))
        self.specs = list(specs) if specs is not None else agent_specs(config, agent_cls)
        self.suite = make_suite(config, self.specs)
        self.failures = FailureWatch(config.agent.max_failure_rate)
        if not self.specs:
            raise ValueError(
                "AgentTrainer has nothing to act in: set agent.environment, or give agent_cls or specs"
            )
        own: dict[str, Any] = dict.fromkeys(("reward_fn", "val_reward_fn"), environment_rewards)
        own |= {
            "train_dataset": range(config.prompts_per_step),
            "val_dataset": range(config.agent.val_length) or None,
        }
        kwargs |= {name: kwargs.get(name) or value for name, value in own.items()}
        super().__init__(config, tokenizer, role_worker_mapping, resource_pool_manager, **kwargs)
        self.processor = kwargs.get("processor")
        self.multi_turn_rollout: Any = None

    def _collator(self, collate_fn: Collate) -> Callable[..., Rows]:
        return as_tasks

    def init_workers(self) -> None:
        self.take_places()
        dataset: Any = self.train_dataloader.dataset
        try_agents(self.config, self.specs, self.tokenizer, as_tasks([dataset[0]])["task"][0])
        super().init_workers()
        own = self.rollout_wg, self.config, self.tokenizer, self.processor
        self.multi_turn_rollout = SyncMultiTurnRollout(*own, specs=self.specs)

    def shutdown(self) -> None:
        """Closes the environments, then as RayPPOTrainer does."""
        # Workers that are busy, or gone, close nothing; their environments then end with them.
        closing = threading.Thread(target=self._close_environments, daemon=True)
        closing.start()
        closing.join(CLOSING_S)
        super().shutdown()

    def _close_environments(self) -> None:
        try:
            if self.multi_turn_rollout is not None:
                self.multi_turn_rollout.close()
        # A worker may be gone.
        except Exception as error:
            logger.warning("environments were not closed: %s", error)

    def prompt_batch(
        self,
        rows: Rows,
        repeat: int,
        first_group: int = 0,
        validate: bool = False,
        step: int | None = None,
    ) -> DataProto:
        info, tasks = self._step_info(validate, step), rows["task"]
        described = describe_episodes(
            len(tasks), repeat, info, first_group=first_group, suite=self.suite, tasks=tasks
        )
        if self.multi_turn_rollout is not None:
            self.multi_turn_rollout.wanted = described
        return described

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Plays the described episodes, over any number of turns; `reset()` alone takes the same."""
        assert self.multi_turn_rollout is not None, "init_workers makes it"
        # Several steps may be played at once.
        rollout = self.multi_turn_rollout if self.ahead is None else copy(self.multi_turn_rollout)
        rollout.reset(gen_batch)
        facts = rollout.rollout()
        batch = rollout.build_update_batch()
        if folder := self.config.agent.episodes_dir:
            try:
                write_episodes(Path(folder), batch)
            # A full disk costs the records, not the run.
            except OSError as error:
                logger.warning(
                    "agent.episodes_dir: step %d was not written: %s", self.global_steps, error
                )
        # With the records there, which show the difference.
        if not self.config.agent.allow_different_tasks:
            require_same_tasks(facts, self.suite.names)
        return batch

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        played, names = self.multi_turn_rollout.take_facts(step=self.global_steps), self.suite.names
        self.failures.check(played)
        metrics = super()._step_metrics(batch, timer) | episode_metrics(played, names)
        if len(names) > 1:
            metrics |= {
                f"env/{name}/weight": weight
                for name, weight in zip(names, self.suite.weights, strict=True)
            }
        rewards: dict[str, list[float]] = {}
        for fact in played:
            if not fact["masked"]:
                rewards.setdefault(names[fact["environment"]], []).append(fact["reward"])
        self.suite.update(rewards)
        return metrics

    def validate(self) -> dict[str, float]:
        metrics = super().validate()
        if self.multi_turn_rollout is not None and (
            validated := self.multi_turn_rollout.take_facts(validate=True)
        ):
            counts = episode_metrics(validated, self.suite.names)
            wanted = (
                "agent/episodes",
                "agent/failed",
                "agent/retries",
                "agent/cut_turns",
                "agent/ending/",
            )
            metrics |= {
                f"val-aux/{name}": value
                for name, value in counts.items()
                if name.startswith(wanted)
            }
        return metrics

    def driver_state(self) -> dict[str, Any]:
        return super().driver_state() | {"suite": self.suite.state_dict()}

    def load_driver_state(self, state: Mapping[str, Any]) -> None:
        super().load_driver_state(state)
        if "suite" in state:
            self.suite.load_state_dict(state["suite"])


def as_tasks(rows: Sequence[Any]) -> Rows:
    """Collates a dataset's rows, which are the environment's tasks; a number stands for an episode without one."""
    return {"task": object_array([dict(row) if isinstance(row, Mapping) else {} for row in rows])}


def make_suite(config: PPOConfig, specs: Sequence[AgentSpec]) -> EnvironmentSuite:
    """Makes the suite of the config's environments, of `agent.suite`'s class where there is one."""
    names: list[str] = []
    for spec in specs:
        name = environment_name(spec.source)
        # The same environment with other settings.
        same = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{same + 1}" if same else name)
    weights = [choice.weight for choice in config.environments]
    own = config.agent.suite
    make = EnvironmentSuite if own.path is None else load_extern_object(own.path, str(own.name))
    return make(names, weights if len(weights) == len(names) else [1.0] * len(names))


# The trial of environments


def try_agents(
    config: PPOConfig,
    specs: Sequence[AgentSpec],
    tokenizer: PreTrainedTokenizerBase,
    task: Task | None = None,
) -> None:
    """Builds and resets an agent of each environment, checks the chat template, and has each play its trial.

    `task` is what resets are given beside a seed.

    Raises:
        ConfigError: environments cannot be built or reset, or always crash; a first prompt is too long; or the
            template cannot continue a conversation.
    """
    template = dict(config.data.apply_chat_template_kwargs)
    tokens = TurnTokens(tokenizer, template_kwargs=template, eos_token_ids=[tokenizer.eos_token_id])
    with open_pool(config, specs) as pool:
        try:
            schemas = pool.tool_schemas
        except CannotBuild as error:
            raise ConfigError(error.problems) from None
        problems: list[str] = []
        for index, tools in enumerate(schemas):
            tokens.check_template(tools=tools)
            name = environment_name(specs[index].source)
            pool.reset(index, index, config.data.run_seed, task)
            reply = wait_for_reply(pool)
            if reply.failure:
                problems.append(say("no_reset", name=name, reply=reply))
                continue
            length, most = len(tokens.prompt(reply.messages, tools)), config.data.max_prompt_length
            if length > most:
                problems.append(say("long_prompt", name=name, length=length, most=most))
            pool.finish(index, "max_turns")
            wait_for_reply(pool)
            if config.agent.trial_episodes:
                max_turn = specs[index].max_turn or config.agent.max_turn
                problems += play_trial(config, pool, index, name, max_turn, task)
    if problems:
        raise ConfigError(problems)


def play_trial(
    config: PPOConfig, pool: EnvironmentPool, slot: int, name: str, max_turn: int, task: Task | None
) -> Iterator[str]:
    """Has an environment play its trial, tells what came of it, and yields what keeps a run from beginning."""
    pool.trial(slot, slot, config.data.run_seed, config.agent.trial_episodes, max_turn, task)
    reply = wait_for_reply(pool)
    if reply.failure == "env_timeout":
        logger.warning(say("times_out", name=name, reply=reply))
        return
    if reply.trial is None:
        yield say("no_trial", name=name, reply=reply)
        return
    outcomes = reply.trial.outcomes.values()
    crashes, played = (
        sum(outcome.crashes for outcome in outcomes),
        sum(outcome.episodes for outcome in outcomes),
    )
    first = next((outcome.error for outcome in outcomes if outcome.error), "")
    if played and crashes == played and config.agent.max_failure_rate < 1:
        yield say("all_crash", name=name, played=played, first=first)
        return
    tell(config, reply.trial, name, max_turn)


def tell(config: PPOConfig, trial: Trial, name: str, max_turn: int) -> None:
    """Logs what each player got, and warns where not playing pays more than playing."""
    clean = {
        player: outcome
        for player, outcome in trial.outcomes.items()
        if outcome.crashes < outcome.episodes
    }
    own = config.agent.overflow_reward
    paid = {player: outcome.reward + own * (player == "cut") for player, outcome in clean.items()}
    if trial.max_turns is not None and trial.max_turns > max_turn:
        logger.warning(say("more_turns", name=name, turns=trial.max_turns, max_turn=max_turn))
    if trial.differs:
        logger.warning(say("trial_differs", name=name))
    told = [
        f"{say(f'player_{player}')} {paid[player]:.3g} in {clean[player].turns:.3g} turns"
        for player in paid
    ]
    played = sum(outcome.episodes for outcome in trial.outcomes.values())
    logger.info(
        "trial of %s (%d episodes): mean reward of %s", name, played, ", ".join(told) or "none"
    )
    for player in [
        player for player, value in paid.items() if value > paid.get("random", value) + 1e-9
    ]:
        words, random = say(f"player_{player}"), paid["random"]
        fix = (
            say("reward_less", most=random - paid[player] + own)
            if player == "cut"
            else say("other_rewards")
        )
        logger.warning(
            say("pays_more", name=name, paid=paid[player], player=words, random=random, fix=fix)
        )


def wait_for_reply(pool: EnvironmentPool) -> StepReply:
    """Waits for the reply to the one call that was made."""
    while not (answers := pool.poll(1.0)):
        pass
    return answers[0][1]
