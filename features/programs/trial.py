"""Tries a run's programs before any model is loaded, with answers that mean nothing.

Invariant: what keeps a program from starting, or from asking in a form that the chat template
takes, is a problem of the configuration; so is one that fails whatever it is answered. A program is
started again, with another answer, only after an attempt that failed.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from custom.env import Task
from custom.model_errors import with_cause_first
from custom.model_usage import USAGE
from custom.tools.chat_form import call_message, reading_problem
from custom.tools.families import FamilyParser
from data.turn_tokens import TemplateRefusal, TurnTokens
from features.programs.exchange import Answer, Asked, Exited, Refusal
from features.programs.opening import open_pool
from features.programs.other_sampling import other_sampling
from features.programs.pool import ProgramPool
from features.programs.spec import ProgramSpec
from training.config import PPOConfig
from workers.environments.reply import StepReply

logger = logging.getLogger(__name__)

# The policy's words in a trial's attempts; in every other one it calls a tool, if it is offered
# one.
ANSWERS = ("Yes.", "7", '{"answer": "Yes."}', "A")
# Requests that are answered at most; further ones are told that the episode has ended.
MAX_ANSWERS = 8
# The longest that a trial may take, in seconds; and how long each wait is.
MAX_TRIAL_S = 120.0
POLL_S = 1.0


def try_programs(
    config: PPOConfig, specs: Sequence[ProgramSpec], tokens: TurnTokens, task: Task | None
) -> list[str]:
    """Runs each program once; returns what keeps a run with it from beginning."""
    problems: list[str] = []
    with open_pool(config, specs, config.max_model_len, None) as pool:
        for index, spec in enumerate(specs):
            trial = _ProgramTrial(config, pool, tokens, spec)
            problems += trial.problems(index, task)
    # The trials' questions to models belong to no step.
    USAGE.take()
    return problems


@dataclass
class _ProgramTrial:
    """Runs one program to its end, and again while it fails.

    Attributes:
        number: of the attempt, from 0.
        requests: how many it made in this attempt.
        refusal: why its first request cannot be served; "": it can.
        was_refused: some request of this attempt was not answered.
        trained: how many requests of all attempts are trained.
        models: by which names they ask.
    """

    config: PPOConfig
    pool: ProgramPool
    tokens: TurnTokens
    spec: ProgramSpec
    number: int = 0
    requests: int = 0
    refusal: str = ""
    was_refused: bool = False
    trained: int = 0
    models: set[str] = field(default_factory=set)

    def problems(self, index: int, task: Task | None) -> Iterator[str]:
        """Yields what keeps a run with this program from beginning."""
        attempts = max(self.config.agent.trial_episodes, 1)
        errors: list[str] = []
        for self.number in range(attempts):
            self.requests = 0
            self.was_refused = False
            seed = self.config.data.run_seed + self.number
            self.pool.reset(index, index, seed, dict(task or {}))
            exited = self._play(index)
            problem = self._problem(exited)
            if problem:
                yield problem
                return
            assert exited is not None
            yield from self._finish(index, exited)
            if exited.failure:
                errors.append(exited.error)
            # A program's answer to a refused request says nothing of answers.
            if exited.failure != "env_crash" or self.was_refused:
                break
        yield from self._judge_failures(errors, attempts)
        yield from self._judge_helpers()

    def _judge_helpers(self) -> Iterator[str]:
        """Yields that nothing that the program asks for is trained."""
        if self.trained or not self.models or not self.config.agent.trial_episodes:
            return
        yield (
            f"program {self.spec.source}: none of its requests is trained, which ask for the "
            f"models {sorted(self.models)}: programs.train_models={list(self.spec.train_models)} "
            f"and programs.helper_prompts={list(self.spec.helper_prompts)} leave all of them out"
        )

    def _problem(self, exited: Exited | None) -> str:
        """Returns what keeps a run from beginning, whatever other attempts show; "": nothing."""
        name = self.spec.source
        if exited is None:
            return f"program {name} did not end within {MAX_TRIAL_S:g} s of its trial"
        if self.refusal:
            return f"program {name}: {self.refusal}"
        if self.requests or self.number:
            return ""
        if exited.failure == "env_crash":
            message = f"program {name} failed in its trial, before it asked for anything"
            return with_cause_first(message, exited.error)
        if exited.failure:
            return ""
        return (
            f"program {name} asked for nothing: it is to use OPENAI_BASE_URL and "
            "OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, of its environment"
        )

    def _finish(self, index: int, exited: Exited) -> Iterator[str]:
        """Ends an attempt, and says what it earned; yields what a reward function raises."""
        name = self.spec.source
        # One that ran out of time may have a busy machine to blame.
        self.pool.finish(index, "done")
        reply = self._wait_for_finish()
        if reply is not None and reply.failure:
            yield f"custom_reward_function: {reply.error}; seen in the trial of program {name}"
        reward = exited.reward if reply is None or reply.reward is None else reply.reward
        if not exited.failure:
            logger.info("trial of program %s: %d requests, reward %s", name, self.requests, reward)

    def _judge_failures(self, errors: Sequence[str], attempts: int) -> Iterator[str]:
        """Yields that a program failed whatever it was answered; warns where it did at times."""
        if not errors:
            return
        name = self.spec.source
        agent = self.config.agent
        always = len(errors) == attempts and not self.was_refused
        if always and agent.trial_episodes and agent.max_failure_rate < 1:
            message = (
                f"program {name} failed in all {attempts} trial episodes, whatever it was answered "
                "(agent.max_failure_rate=1 trains all the same)"
            )
            yield with_cause_first(message, errors[0])
            return
        tried = self.number + 1
        message = (
            f"program {name} failed in {len(errors)} of {tried} trial episodes, whose answers mean "
            "nothing"
        )
        logger.warning("%s", with_cause_first(message, errors[0]))

    def _play(self, index: int) -> Exited | None:
        """Answers a program until it ends; None where it does not."""
        until = time.monotonic() + MAX_TRIAL_S
        while time.monotonic() < until:
            for _, heard in self.pool.poll(POLL_S):
                if isinstance(heard, Exited):
                    return heard
                if isinstance(heard, Asked):
                    self.pool.answer(index, heard.number, self._answer(heard))
        return None

    def _answer(self, asked: Asked) -> Answer:
        """Answers a request, or refuses it as the run would."""
        if asked.only_counts:
            return Answer(prompt_tokens=len(self.tokens.prompt(asked.messages, asked.tools)))
        self.requests += 1
        self.trained += asked.trained
        self.models.add(asked.model)
        max_turn = self.spec.max_turn or self.config.agent.max_turn
        if self.requests > min(MAX_ANSWERS, max_turn):
            self.was_refused = True
            return Answer(refusal="ended", error="the trial has ended")
        refusal, error = self._refusal(asked)
        if refusal:
            self.was_refused = True
            if self.requests == 1:
                self.refusal = error
            return Answer(refusal=refusal, error=error)
        text = self._text(asked)
        ids = tuple(self.tokens.encode(text))
        return Answer(
            text=text,
            token_ids=ids,
            log_probs=(0.0,) * len(ids),
            token_texts=(text,) + ("",) * (len(ids) - 1),
        )

    def _text(self, asked: Asked) -> str:
        """Returns what the policy says in this attempt."""
        if not asked.tools or self.number % 2 == 0:
            return ANSWERS[self.number % len(ANSWERS)]
        name = asked.tools[0]["function"]["name"]
        if isinstance(self.spec.parser, FamilyParser):
            # The parser reads what the chat template writes for it.
            empty = call_message(name, self.spec.parser.empty_arguments, "call00000")
            return self.tokens.text(
                self.tokens.encode(self.tokens.written_turn(asked.messages, empty, asked.tools))
            )
        if self.spec.parser == "react":
            return f"Action: {name}\nAction Input: {{}}"
        return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'

    def _refusal(self, asked: Asked) -> tuple[Refusal, str]:
        """Returns why a request cannot be served; "": it can."""
        limit = self.config.data.max_prompt_length
        if asked.tools:
            problem = reading_problem(self.spec.parser, self.tokens)
            if problem:
                return "template", problem
        differences = other_sampling(asked, self.config.actor_rollout_ref.rollout)
        if differences and self.spec.client_sampling == "refuse":
            return "sampling", f"{'; '.join(differences)} (programs.client_sampling=refuse)"
        try:
            length = len(asked.prompt_ids)
            if not asked.prompt_ids:
                length = len(self.tokens.prompt(asked.messages, asked.tools))
        except TemplateRefusal as error:
            return "template", str(error)
        if length > limit and self.requests == 1:
            return "context_length", (
                f"its first request has {length} tokens, data.max_prompt_length={limit}: raise it"
            )
        return "", ""

    def _wait_for_finish(self) -> StepReply | None:
        """Waits for the end's reply; None where there is none in time."""
        until = time.monotonic() + MAX_TRIAL_S
        while time.monotonic() < until:
            for _, heard in self.pool.poll(POLL_S):
                if isinstance(heard, StepReply):
                    return heard
        return None
