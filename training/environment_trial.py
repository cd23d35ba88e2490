"""Tries who plays before any model is loaded: of each kind of episodes its trial.

Do environments start, does the chat template continue their conversations, and does play pay more
than not playing? Invariant: everything that keeps the run from beginning is reported together, in
the list of problems of the configuration.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from custom.agent import AgentSpec
from custom.env import BadEnvironment, Message, Task
from custom.model_errors import UnknownModel, with_cause_first
from custom.tools.chat_form import WrongForm, reading_problem
from custom.trial import MAX_TRIAL_S, Trial
from data.template_check import check_template
from data.turn_tokens import Tools, TurnTokens
from data.watchdog import ATTEMPT
from training.config import PPOConfig
from training.config.loader import ConfigError
from workers.agent_pools import open_pool
from workers.agent_specs import reward_problems
from workers.environments.names import CannotBuild, environment_name, environment_source
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply
from workers.rollout.kinds import EpisodeSpec, by_kind
from workers.turn_reading import turn_tokens, with_parser

logger = logging.getLogger(__name__)

# Seconds after which it is said that one is still waited for; a whole trial should have ended.
LONG_S = MAX_TRIAL_S + 5.0
# The answers of each player of a trial (custom.agent.PLAYERS).
PLAYER_ANSWERS = {
    "random": "random answers",
    "garbage": "unreadable ones",
    "quitting": "one and then unreadable ones",
    "cut": "one and then no room for more",
}
# How an error begins whose cause is what a method returned.
RETURNED = BadEnvironment.__name__
# A warning lists at most so many words.
MAX_WORDS_SHOWN = 6
# By so much a player's reward must exceed random play's, which is a sum in another order.
TOLERANCE = 1e-9


def try_agents(
    config: PPOConfig,
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
    task: Task | None = None,
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Has each kind of episodes try its specs, such as environments that play a trial.

    Args:
        task: what resets are given beside a seed.
        eos_token_ids: the ids at which sampling stops; none: the tokenizer's.

    Raises:
        ConfigError: environments cannot be built or reset, or always crash; a first prompt is too
            long.
        ValueError: the chat template cannot continue a conversation.
    """
    try:
        stops = eos_token_ids or [tokenizer.eos_token_id]
        tokens = turn_tokens(config, tokenizer, stops, specs)
    except WrongForm as error:
        raise ConfigError([str(error)]) from error
    specs = with_parser(specs, tokens)
    problems: list[str] = []
    for kind, numbers in by_kind(specs):
        if kind.trial is not None:
            of_kind = [specs[number] for number in numbers]
            problems += kind.load(kind.trial)(config, of_kind, tokens, task)
    if problems:
        raise ConfigError(problems)


def try_environments(
    config: PPOConfig, specs: Sequence[AgentSpec], tokens: TurnTokens, task: Task | None
) -> list[str]:
    """Builds and resets an agent of each environment; returns what keeps a run from beginning."""
    problems: list[str] = []
    with open_pool(config, specs) as pool:
        try:
            schemas = pool.tool_schemas
        except CannotBuild as error:
            return list(error.problems)
        trial = _EnvironmentTrial(config, pool, tokens, task)
        for index, tools in enumerate(schemas):
            problem = reading_problem(specs[index].parser, tokens) if tools else ""
            if problem:
                problems.append(problem)
                continue
            check_template(tokens, tools=tools)
            problems += trial.problems(index, specs, tools)
    return problems


@dataclass(frozen=True)
class _EnvironmentTrial:
    """Resets environments and has them play their trial, one after the other."""

    config: PPOConfig
    pool: EnvironmentPool
    tokens: TurnTokens
    task: Task | None

    def problems(self, index: int, specs: Sequence[AgentSpec], tools: Tools) -> Iterator[str]:
        """Yields what keeps a run with this environment from beginning."""
        spec = specs[index]
        name = environment_name(spec.source)
        source = environment_source(spec.source)
        self.pool.reset(index, index, self.config.data.run_seed, self.task)
        reply = self._wait_for_reply(index, f"the first reset of environment {source}")
        if reply.failure:
            problem = f"environment {source} failed in its first reset"
            yield with_cause_first(problem, reply.error) + self._advice(reply)
            return
        length = len(self.tokens.prompt(reply.messages, tools))
        limit = self.config.data.max_prompt_length
        if length > limit:
            yield (
                f"environment {name}: a first prompt has {length} tokens, "
                f"data.max_prompt_length={limit}: raise it, or shorten the observation"
            )
        prompt = " ".join(message["content"] for message in reply.messages)
        self._warn_of_unknown_words(name, prompt, "a first prompt")
        self.pool.finish(index, "max_turns")
        self._wait_for_reply(index, f"the end of an episode of environment {source}")
        # Rows are paid by the reward manager, which the trial does not ask.
        if self.config.plays_dataset_rows:
            return
        if self.config.agent.trial_episodes:
            yield from self._play(index, spec, spec.max_turn or self.config.agent.max_turn)
        else:
            seed = self.config.data.run_seed
            yield from reward_problems(self.pool, specs, index, seed, self.task)

    def _play(self, index: int, spec: AgentSpec, max_turn: int) -> Iterator[str]:
        """Lets an environment play its trial and reports on it; yields its problems."""
        agent = self.config.agent
        seed = self.config.data.run_seed
        name = environment_name(spec.source)
        source = environment_source(spec.source)
        self.pool.trial(index, index, seed, agent.trial_episodes, max_turn, self.task)
        reply = self._wait_for_reply(index, f"the trial of environment {source}")
        if reply.failure == "env_timeout":
            problem = f"environment {source} hung in its trial: {reply.error}{self._advice(reply)}"
            # One that hangs now and then must not end a run that is started again by itself.
            may_end = agent.max_failure_rate < 1 and os.environ.get(ATTEMPT, "1") == "1"
            if may_end and self._hangs_again(index, max_turn):
                yield (
                    f"{problem}; so it did with another seed; agent.trial_episodes=0 starts "
                    "without a trial"
                )
            else:
                logger.warning("%s", problem)
            return
        if reply.failure == "reward_fault":
            yield f"{reply.error}; seen in the trial of environment {name}"
            return
        if reply.trial is None:
            yield f"environment {name} failed in its trial ({reply.failure}): {reply.error}"
            return
        crash_problems = list(self._check_crashes(source, reply.trial))
        yield from crash_problems
        if crash_problems:
            return
        report_trial(self.config, reply.trial, name, max_turn)
        answers = " ".join(reply.trial.sampled_actions)
        self._warn_of_unknown_words(name, answers, "the answers that sample_action drew")
        if max_turn > 1:
            self._warn_where_no_second_turn_fits(name, reply.trial.first_reply)

    def _hangs_again(self, index: int, max_turn: int) -> bool:
        """Plays a seed that was not played yet: does the environment hang there, too?"""
        agent = self.config.agent
        other_seed = self.config.data.run_seed + agent.trial_episodes
        self.pool.trial(index, index, other_seed, 1, max_turn, self.task)
        reply = self._wait_for_reply(index, "a second trial of an environment that hung")
        return reply.failure == "env_timeout"

    def _check_crashes(self, source: str, trial: Trial) -> Iterator[str]:
        """Yields that an environment crashed whenever it was played; warns where it did at times.

        Unreadable answers may end an episode before it comes to what crashes the others.
        """
        crashed = sum(outcome.crashes for outcome in trial.outcomes.values())
        if not crashed:
            return
        played = sum(outcome.episodes for outcome in trial.outcomes.values())
        errors = [outcome.error for outcome in trial.outcomes.values() if outcome.error]
        of_play = [outcome for player, outcome in trial.outcomes.items() if player != "garbage"]
        always = all(outcome.crashes == outcome.episodes for outcome in of_play)
        how_many = f"all {played}" if crashed == played else f"{crashed} of {played}"
        message = f"environment {source} crashed in {how_many} trial episodes"
        if not always or self.config.agent.max_failure_rate == 1:
            logger.warning("%s", with_cause_first(message, errors[0]))
            return
        which = "" if crashed == played else ", in all that began with a random answer"
        rule = "what it cannot read it must answer, not raise; "
        # The error tells what it returned, or what the config says.
        if any(kind in errors[0] for kind in (RETURNED, UnknownModel.__name__)):
            rule = ""
        message += f"{which} ({rule}agent.max_failure_rate=1 trains all the same)"
        yield with_cause_first(message, errors[0])

    def _warn_where_no_second_turn_fits(self, name: str, observation: list[Message]) -> None:
        """Warns where what answers the first action is as long as a whole response may be."""
        text = "\n".join(message["content"] for message in observation)
        length = len(self.tokens.tokenizer.encode(text, add_special_tokens=False))
        longest = self.config.data.max_response_length
        if length >= longest:
            logger.warning(
                f"{name}: no second turn fits: an observation has about {length} tokens, and "
                f"data.max_response_length={longest} is for all turns and observations together"
            )

    def _warn_of_unknown_words(self, name: str, text: str, what: str) -> None:
        """Warns where the tokenizer has one token for all words of a text that it lacks.

        Args:
            what: the text is.
        """
        tokenizer = self.tokens.tokenizer
        if tokenizer.unk_token_id is None:
            return
        words = dict.fromkeys(text.split())
        unknown = [
            word
            for word in words
            if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False)
        ]
        if not unknown:
            return
        shown = ", ".join(unknown[:MAX_WORDS_SHOWN]) + (", …" * (len(unknown) > MAX_WORDS_SHOWN))
        logger.warning(
            f"{name}: the model's tokenizer does not know {len(unknown)} of the {len(words)} words "
            f"of {what} ({shown}): it reads them all as {tokenizer.unk_token}, and can "
            "write none of them. Where examples/prepare_game.py made the model, delete its "
            f"folder, actor_rollout_ref.model.path={self.config.actor_rollout_ref.model.path}, and "
            "run that program again; else give a model whose tokenizer has these words"
        )

    def _advice(self, reply: StepReply) -> str:
        """Returns what to do about a call that did not end; "" of any other reply."""
        if reply.failure != "env_timeout":
            return ""
        return (
            "; mend what does not end there, or where a call may take so long raise "
            f"agent.step_timeout_s={self.config.agent.step_timeout_s}"
        )

    def _wait_for_reply(self, index: int, what: str) -> StepReply:
        """Waits for the reply to the one call that was made; says so once where that takes long.

        Args:
            index: the environment's, and the key of its episode.
            what: is waited for.
        """
        is_said = False

        def say_where_long(waited_s: float) -> None:
            nonlocal is_said
            if waited_s <= LONG_S or is_said:
                return
            is_said = True
            line = self.pool.line_of(index)
            logger.warning(
                f"{what} takes long: {waited_s:.0f} s so far{line and ', now in '}{line}; a "
                f"call may take agent.step_timeout_s={self.config.agent.step_timeout_s}"
            )

        return self.pool.wait_for_reply(say_where_long)


def report_trial(config: PPOConfig, trial: Trial, name: str, max_turn: int) -> None:
    """Logs what each player got, and warns where not playing pays more than playing."""
    if trial.max_turns is not None and trial.max_turns > max_turn:
        logger.warning(
            f"{name} may last {trial.max_turns} turns, agent.max_turn={max_turn} ends it before: "
            "what it pays at its end is then lost"
        )
    if trial.differs:
        logger.warning(
            f"{name} differs under one seed: it began differently, or answered the same first "
            "action differently, so that members of a group would not face the same task; have "
            "reset(seed) decide all that is drawn"
        )
    rewards = _mean_rewards(config, trial)
    results = [
        f"{PLAYER_ANSWERS[player]} {reward:.3g} in {trial.outcomes[player].turns:.3g} turns"
        for player, reward in rewards.items()
    ]
    # Each player plays the same seeds.
    episodes = max((outcome.episodes for outcome in trial.outcomes.values()), default=0)
    shown = ", ".join(results) or "none"
    logger.info("trial of %s, %d episodes of each player: mean reward of %s", name, episodes, shown)
    _tell_where_all_is_paid_alike(name, trial)
    if not trial.samples_actions and rewards.get("random") == rewards.get("garbage"):
        logger.info(
            f"{name} has no sample_action(generator), and random words are as good as unreadable "
            "ones: the trial shows little. Such a method returns a readable action, drawn from the "
            "generator"
        )
    if "random" in rewards:
        _warn_where_not_playing_pays(config, name, rewards)


def _tell_where_all_is_paid_alike(name: str, trial: Trial) -> None:
    """Warns where random answers all got the same, and an unreadable one as much.

    Where that is 0 it is only noted: so games pay that random answers win rarely.
    """
    ended = [
        trial.outcomes[player]
        for player in ("random", "garbage")
        if player in trial.outcomes
        and trial.outcomes[player].crashes < trial.outcomes[player].episodes
    ]
    if len(ended) < 2:
        return
    played, unreadable = ended
    differ = played.most - played.least > TOLERANCE
    if differ or abs(unreadable.most - played.most) > TOLERANCE:
        return
    logger.log(
        logging.WARNING if played.most else logging.INFO,
        f"{name} paid {played.most:.3g} for each random answer, and as much for an unreadable one: "
        "no answer that was tried is better than another, and nothing is learnt while that is so",
    )


def _mean_rewards(config: PPOConfig, trial: Trial) -> dict[str, float]:
    """Returns what a run would pay each player, over the episodes that did not crash."""
    rewards = {}
    for player, outcome in trial.outcomes.items():
        if outcome.crashes < outcome.episodes:
            rewards[player] = outcome.reward
            if player == "cut":
                rewards[player] += config.agent.overflow_reward
    return rewards


def _warn_where_not_playing_pays(config: PPOConfig, name: str, rewards: dict[str, float]) -> None:
    random_reward = rewards["random"]
    for player, reward in rewards.items():
        if reward <= random_reward + TOLERANCE:
            continue
        fix = "the environment's invalid_reward, or its rewards"
        if player == "cut":
            most = random_reward - reward + config.agent.overflow_reward
            fix = f"agent.overflow_reward to {most:.3g} or less"
        logger.warning(
            f"{name} pays {reward:.3g} for {PLAYER_ANSWERS[player]} and {random_reward:.3g} for "
            f"random answers: a policy may learn not to play; change {fix}"
        )
