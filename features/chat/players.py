"""The person in an episode: in place of the environment's worker, or of the engine.

Invariant: the turn loop is training's; nobody ends a person's turn for its length in time, and
what a person writes as the policy becomes ids by the model's tokenizer.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from custom.agent import AgentSpec
from custom.asking import PolicyAnswer
from data.turn_tokens import TurnTokens
from features.chat.terminal import HELP, Terminal
from training.config import PPOConfig
from workers.environments.reply import StepReply
from workers.environments.server import EnvServer
from workers.model.builder import ModelSpec
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Episode, TurnLimits
from workers.rollout.history import Deciding, Decision, HistoryRule, NewContext, Standing
from workers.rollout.turn_loop import is_asked_aside


class Calls(Protocol):
    """Answers an episode's calls to its environment, as the environment pool does."""

    def reset(self, key: int, spec_index: int, seed: int, task: dict[str, Any]) -> None:
        """Begins an episode."""

    def step(self, key: int, text: str) -> None:
        """Plays a turn."""

    def finish(self, key: int, ending: str) -> None:
        """Ends the episode."""

    def answer(self, key: int, answers: Sequence[PolicyAnswer]) -> None:
        """Goes on with a call that has asked the policy."""

    def give_up(self, key: int, error: str) -> None:
        """Ends an episode whose call will not be answered."""

    def poll(self, timeout: float) -> list[tuple[int, StepReply]]:
        """Returns the answers that have come."""


class CallsHere:
    """Makes an environment's calls at once, in the thread that asks, and without deadlines.

    Ctrl-C so reaches a person who is asked for a reply.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.server = EnvServer()
        self.server.call("build", (spec,))
        self.replies: list[tuple[int, StepReply]] = []

    def reset(self, key: int, spec_index: int, seed: int, task: dict[str, Any]) -> None:
        """Begins an episode."""
        self.replies.append((key, self.server.call("reset", (seed, task))))

    def step(self, key: int, text: str) -> None:
        """Plays a turn."""
        self.replies.append((key, self.server.call("step", (text,))))

    def finish(self, key: int, ending: str) -> None:
        """Ends the episode."""
        self.replies.append((key, self.server.call("finish", (ending,))))

    def answer(self, key: int, answers: Sequence[PolicyAnswer]) -> None:
        """Does nothing: calls that are made here cannot ask."""

    def give_up(self, key: int, error: str) -> None:
        """Does nothing, likewise."""

    def poll(self, timeout: float) -> list[tuple[int, StepReply]]:
        """Returns the answers that have come."""
        replies = self.replies
        self.replies = []
        return replies


class ShownCalls:
    """Shows an episode turn by turn on its way to the environment and back.

    Args:
        calls: who answers.
        terminal: where it is shown.
        episode, limits: what is played, and how far.
        shows_policy: the policy's turns are shown, as nobody has typed them.
        pauses: Enter goes on before the environment is asked.
    """

    def __init__(
        self,
        calls: Calls,
        terminal: Terminal,
        episode: Episode,
        limits: TurnLimits,
        *,
        shows_policy: bool,
        pauses: bool,
    ) -> None:
        self.calls = calls
        self.terminal = terminal
        self.episode = episode
        self.limits = limits
        self.shows_policy = shows_policy
        self.pauses = pauses

    def reset(self, key: int, spec_index: int, seed: int, task: dict[str, Any]) -> None:
        """Begins an episode."""
        self.calls.reset(key, spec_index, seed, task)

    def step(self, key: int, text: str) -> None:
        """Shows the policy's turn, and has it played."""
        if self.shows_policy:
            self.terminal.show_message("policy", text)
        self.terminal.show(f"({describe_turn(self.episode, self.limits)})")
        if self.pauses:
            self.terminal.pause()
        self.calls.step(key, text)

    def finish(self, key: int, ending: str) -> None:
        """Ends the episode."""
        self.calls.finish(key, ending)

    def answer(self, key: int, answers: Sequence[PolicyAnswer]) -> None:
        """Goes on with a call that has asked the policy, and shows what that said."""
        for answer in answers:
            self.terminal.show_message("policy, asked by the environment", answer.text)
        self.calls.answer(key, answers)

    def give_up(self, key: int, error: str) -> None:
        """Ends an episode whose call will not be answered."""
        self.calls.give_up(key, error)

    def poll(self, timeout: float) -> list[tuple[int, StepReply]]:
        """Returns the answers that have come, and shows them."""
        answers = self.calls.poll(timeout)
        for _, reply in answers:
            self._show(reply)
        return answers

    def _show(self, reply: StepReply) -> None:
        # A person who is the policy reads them when they are to answer.
        if self.shows_policy:
            for question in reply.questions:
                for message in question.messages:
                    role = f"{message['role']}, to {question.name}"
                    self.terminal.show_message(role, message["content"])
        was_typed = isinstance(self.calls, CallsHere) and not reply.tool_calls
        for message in reply.messages:
            # A person knows what they have just typed.
            if message["content"] and not was_typed:
                self.terminal.show_message(message["role"], message["content"])
        if reply.failure:
            self.terminal.show(f"the environment failed ({reply.failure}): {reply.error}")
        elif reply.reward is not None:
            ends = ", the episode is done" if reply.done else ""
            self.terminal.show(f"(reward {reply.reward:g}{ends})")


class ShownHistory(HistoryRule):
    """Shows what a history has the policy write, and the contexts that it begins.

    Args:
        history: the run's.
        terminal: where it is shown.
        shows_policy: what the policy writes is shown, as nobody has typed it.
    """

    def __init__(self, history: HistoryRule, terminal: Terminal, *, shows_policy: bool) -> None:
        self.history = history
        self.terminal = terminal
        self.shows_policy = shows_policy
        self.reserved = history.reserved

    def next_context(self, standing: Standing) -> Decision | Deciding:
        """Decides as the run's history does."""
        answer = self.history.next_context(standing)
        if answer is None or isinstance(answer, NewContext):
            self._show(answer)
            return answer
        return self._shown(answer)

    def _shown(self, deciding: Deciding) -> Deciding:
        try:
            writing = next(deciding)
            while True:
                for message in writing.messages:
                    self.terminal.show_message(message["role"], message["content"])
                written = yield writing
                if self.shows_policy:
                    self.terminal.show_message(f"policy, {writing.purpose}", written.text)
                writing = deciding.send(written)
        except StopIteration as end:
            decision: Decision = end.value
        self._show(decision)
        return decision

    def _show(self, decision: Decision) -> None:
        """Shows the messages with which a context begins."""
        if decision is None:
            return
        fault = f"; {decision.fault}" if decision.fault else ""
        self.terminal.show(f"(a new context begins: {decision.reason}{fault}. The policy reads)")
        for message in decision.messages:
            self.terminal.show_message(message["role"], message["content"])


def describe_turn(episode: Episode, limits: TurnLimits) -> str:
    """Describes the last turn of an episode and what is left of its limits."""
    turn = episode.turns[-1]
    of_turns = "" if limits.max_turn is None else f" of {limits.max_turn}"
    cut = ", cut by its limit" if turn.finish_reason == "length" else ""
    left = max(0, limits.room(episode.row))
    return (
        f"turn {episode.num_played}{of_turns}: {turn.tokens} tokens{cut}; {left} of "
        f"{limits.response_length} left"
    )


class PersonEngine(BaseRollout):
    """Asks a person for each turn: an engine without a model.

    The person's text is what the policy would have sampled, with the end-of-turn token behind it;
    log-probs are 0, as nobody sampled it.
    """

    def __init__(
        self, config: PPOConfig, model: ModelSpec, tokens: TurnTokens, terminal: Terminal
    ) -> None:
        super().__init__(
            config.resolved_rollout,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
        )
        self.tokens = tokens
        self.terminal = terminal
        self.pending: deque[tuple[str, list[int], Sampling]] = deque()

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues a turn."""
        self.pending.append((request_id, prompt_ids, sampling))

    def step(self) -> list[Completion]:
        """Asks for the turns that are queued; who leaves has the engine give them up."""
        completions = []
        while self.pending:
            request_id, prompt_ids, sampling = self.pending.popleft()
            # Questions of the environment's, of which there may be several at once.
            if is_asked_aside(request_id):
                asked = self.tokens.tokenizer.decode(prompt_ids)
                self.terminal.show_message("the environment asks", asked)
            completions.append(self._ask(request_id, sampling))
        return completions

    def _ask(self, request_id: str, sampling: Sampling) -> Completion:
        try:
            text = self.terminal.message(
                f"policy (at most {sampling.max_tokens} tokens)> ", self._command
            )
        except (EOFError, KeyboardInterrupt):
            text = None
        if text is None:
            return Completion(
                request_id=request_id, token_ids=[], log_probs=[], finish_reason="abort"
            )
        token_ids = self._ids_of(text)[: sampling.max_tokens]
        read_text = self.tokens.text(token_ids)
        if read_text != text:
            self.terminal.show(f"(the environment reads: {read_text})")
        is_whole = token_ids[-1] in sampling.stop_token_ids
        return Completion(
            request_id=request_id,
            token_ids=token_ids,
            log_probs=[0.0] * len(token_ids),
            finish_reason="stop" if is_whole else "length",
        )

    def _command(self, line: str) -> bool:
        """Follows a command; returns whether it ends the reading: of an episode that is left."""
        if line.strip() == "/done":
            return True
        self.terminal.show(f"{HELP}\n  /done does, too; write // for a message that begins with /")
        return False

    def _ids_of(self, text: str) -> list[int]:
        """Tokenises a person's text as plain text, whatever markers it holds, and ends the turn."""
        tokenizer = self.tokens.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [*ids, self.eos_token_ids[0]]

    def update_weights(self, weights: Any, manifest: dict[str, torch.Size]) -> None:
        """Does nothing: there are no weights."""
