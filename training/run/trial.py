"""Tries a run's environments before any model is loaded: do they start, and does play pay more than not playing?

Invariant: what is wrong with any of them is reported together, in the list of problems of the configuration.
"""

import logging
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from custom.agent import LONGEST_S, AgentSpec, Trial
from custom.env import Task
from data.texts import say
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from training.config.loader import ConfigError
from workers.environments.env_server import StepReply
from workers.environments.pool import CannotBuild, EnvironmentPool, environment_name
from workers.multi_turn_rollout import open_pool

logger = logging.getLogger(__name__)


def try_agents(
    config: PPOConfig, specs: Sequence[AgentSpec], tokenizer: PreTrainedTokenizerBase, task: Task | None = None
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
                problems += play_trial(config, pool, tokens, index, name, max_turn, task)
    if problems:
        raise ConfigError(problems)


def play_trial(
    config: PPOConfig, pool: EnvironmentPool, tokens: TurnTokens, slot: int, name: str, max_turn: int, task: Task | None
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
    crashes, played = sum(outcome.crashes for outcome in outcomes), sum(outcome.episodes for outcome in outcomes)
    first = next((outcome.error for outcome in outcomes if outcome.error), "")
    if played and crashes == played and config.agent.max_failure_rate < 1:
        yield say("all_crash", name=name, played=played, first=first)
        return
    if crashes:
        logger.warning(say("some_crash", name=name, crashes=crashes, played=played, first=first))
    tell(config, reply.trial, name, max_turn)
    told = "\n".join(message["content"] for message in reply.trial.told)
    length, room = len(tokens.tokenizer.encode(told, add_special_tokens=False)), config.data.max_response_length
    if max_turn > 1 and length >= room:
        logger.warning(say("no_second_turn", name=name, length=length, room=room))


def tell(config: PPOConfig, trial: Trial, name: str, max_turn: int) -> None:
    """Logs what each player got, and warns where not playing pays more than playing, or the trial shows little."""
    clean = {player: outcome for player, outcome in trial.outcomes.items() if outcome.crashes < outcome.episodes}
    own = config.agent.overflow_reward
    paid = {player: outcome.reward + own * (player == "cut") for player, outcome in clean.items()}
    if trial.max_turns is not None and trial.max_turns > max_turn:
        logger.warning(say("more_turns", name=name, turns=trial.max_turns, max_turn=max_turn))
    if trial.differs:
        logger.warning(say("trial_differs", name=name))
    told = [f"{say(f'player_{player}')} {paid[player]:.3g} in {clean[player].turns:.3g} turns" for player in paid]
    played, wanted = sum(outcome.episodes for outcome in trial.outcomes.values()), 4 * config.agent.trial_episodes
    cut = "" if played == wanted else f", stopped after {LONGEST_S:.0f} s"
    logger.info("trial of %s (%d episodes%s): mean reward of %s", name, played, cut, ", ".join(told) or "none")
    if not trial.readable and paid.get("random") == paid.get("garbage"):
        logger.warning(say("shows_little", name=name))
    for player in [player for player, value in paid.items() if value > paid.get("random", value) + 1e-9]:
        words, random = say(f"player_{player}"), paid["random"]
        fix = say("reward_less", most=random - paid[player] + own) if player == "cut" else say("other_rewards")
        logger.warning(say("pays_more", name=name, paid=paid[player], player=words, random=random, fix=fix))


def wait_for_reply(pool: EnvironmentPool) -> StepReply:
    """Waits for the reply to the one call that was made."""
    while not (answers := pool.poll(1.0)):
        pass
    return answers[0][1]
