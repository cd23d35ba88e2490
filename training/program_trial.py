"""Tries a run's programs before any model is loaded: each once, with answers that mean nothing.

Invariant: what keeps a program from starting, or from asking in a form that the chat template
takes, is a problem of the configuration; what it makes of senseless answers is not.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from custom.env import Task
from custom.models.usage import USAGE
from data.conversation import TemplateRefusal
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from workers.agent_pools import open_program_pool
from workers.environments.reply import StepReply
from workers.programs.exchange import Answer, Asked, Exited, Refusal
from workers.programs.other_sampling import other_sampling
from workers.programs.pool import ProgramPool
from workers.programs.spec import ProgramSpec

logger = logging.getLogger(__name__)

# What the policy says in a trial.
ANSWER = "Yes."
# Requests that are answered; further ones are told that the episode has ended.
MAX_ANSWERS = 8
# The longest that a trial may take, in seconds; and how long each wait is.
MAX_TRIAL_S = 120.0
POLL_S = 1.0


def try_programs(
    config: PPOConfig, specs: Sequence[ProgramSpec], tokens: TurnTokens, task: Task | None
) -> list[str]:
    """Runs each program once; returns what keeps a run with it from beginning."""
    problems: list[str] = []
    with open_program_pool(config, dict(enumerate(specs)), config.max_model_len) as pool:
        for index, spec in enumerate(specs):
            trial = _ProgramTrial(config, pool, tokens, spec)
            problems += trial.problems(index, task)
    # What trials asked of models is no step's.
    USAGE.take()
    return problems


@dataclass
class _ProgramTrial:
    """Runs one program to its end.

    Attributes:
        requests: how many it made.
        refusal: why its first request cannot be served; "": it can.
    """

    config: PPOConfig
    pool: ProgramPool
    tokens: TurnTokens
    spec: ProgramSpec
    requests: int = 0
    refusal: str = ""

    def problems(self, index: int, task: Task | None) -> Iterator[str]:
        """Yields what keeps a run with this program from beginning."""
        name = self.spec.source
        self.pool.reset(index, index, self.config.data.run_seed, dict(task or {}))
        exited = self._play(index)
        if exited is None:
            yield f"program {name} did not end within {MAX_TRIAL_S:g} s of its trial"
            return
        if self.refusal:
            yield f"program {name}: {self.refusal}"
            return
        if exited.failure == "env_crash" and not self.requests:
            yield f"program {name} failed in its trial, before it asked for anything: " + (
                exited.error
            )
            return
        if exited.failure:
            logger.warning(
                "program %s failed in its trial, where every answer is %r: %s",
                name,
                ANSWER,
                exited.error,
            )
        if not self.requests and not exited.failure:
            yield (
                f"program {name} asked for nothing: it is to use OPENAI_BASE_URL and "
                "OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, of its environment"
            )
            return
        # One that ran out of time may have a busy machine to blame.
        self.pool.finish(index, "done")
        reply = self._wait_for_finish()
        if reply is not None and reply.failure:
            yield f"custom_reward_function: {reply.error}; seen in the trial of program {name}"
        reward = exited.reward if reply is None or reply.reward is None else reply.reward
        logger.info("trial of program %s: %d requests, reward %s", name, self.requests, reward)

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
        self.requests += 1
        if self.requests > MAX_ANSWERS:
            return Answer(refusal="ended", error="the trial has ended")
        refusal, error = self._refusal(asked)
        if refusal:
            if self.requests == 1:
                self.refusal = error
            return Answer(refusal=refusal, error=error)
        ids = tuple(self.tokens.encode(ANSWER))
        return Answer(
            text=ANSWER,
            token_ids=ids,
            log_probs=(0.0,) * len(ids),
            token_texts=(ANSWER,) + ("",) * (len(ids) - 1),
        )

    def _refusal(self, asked: Asked) -> tuple[Refusal, str]:
        """Returns why a request cannot be served; "": it can."""
        limit = self.config.data.max_prompt_length
        differences = other_sampling(asked, self.config.actor_rollout_ref.rollout)
        if differences and self.spec.client_sampling == "refuse":
            return "sampling", f"{'; '.join(differences)} (agent.client_sampling=refuse)"
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
