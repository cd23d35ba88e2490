"""Plays an episode in its environment: reset, then sample and step until something ends it.

It is a coroutine that the turn loop answers (turn_loop.py); what it keeps, and the limits that end
it, are those of episode.py. Where a history is given (history.py) it is asked behind each turn:

    _take_turn -> step -> _go_on -> _decide -> (_write) -> _begin_context, a new row
                                           -> _join, the same row

Invariant: without a history nothing is asked and nothing copied; a new context begins behind a
whole turn, or in the place of one that the context's end cut.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from custom.env import Message
from data.cut_text import CutText
from data.seeds import seed_beside, seed_for
from data.turn_tokens import Conversation, Join, TemplateRefusal, Tools, TurnTokens
from workers.environments.reply import Call, StepReply
from workers.rollout.begin import BRANCH_ENDINGS, DIFFERS, SAME
from workers.rollout.branches import BranchRule
from workers.rollout.engine import Completion, copy_with
from workers.rollout.episode import (
    FAILURES,
    Ended,
    EnvironmentGone,
    Episode,
    Play,
    PromptSource,
    Request,
    Row,
    Sample,
    Sampler,
    Seam,
    Turn,
    TurnLimits,
    anchor_of,
    ask,
    begin_row,
    sample,
    take_completion,
)
from workers.rollout.history import HistoryRule, NewContext, Standing, Writing, Written
from workers.rollout.questions import QuestionRule, Questions


def play_episode(
    episode: Episode,
    sampler: Sampler,
    limits: TurnLimits,
    tokens: TurnTokens | None,
    tools: Sequence[Tools],
    history: HistoryRule | None = None,
    questions: QuestionRule | None = None,
    branches: BranchRule | None = None,
) -> Play:
    """Plays an episode in its environment, from the reset to `episode.ending`.

    Args:
        tokens: None: the episode is a prompt and its answer.
        tools: per environment, its tools' schemas.
        history: decides where a new context begins; None: nowhere.
        questions: answers what the environment asks the policy; None: that is refused.
        branches: has states kept, from which branches may begin; None: none are.
    """
    asked = None
    try:
        if tokens is None:
            completion = yield from sample(episode, sampler, limits)
            episode.ending = completion.finish_reason
            return
        if questions is not None:
            asked = questions(episode, sampler, limits, tokens)
        playing = Playing(
            episode=episode,
            sampler=sampler,
            limits=limits,
            tokens=tokens,
            tools=tools[episode.spec],
            history=history,
            questions=asked,
            branches=branches,
        )
        episode.ending, episode.error = yield from playing.take_turns()
        # Endings of branches are no concern of the environment's.
        ending = "max_turns" if episode.ending in BRANCH_ENDINGS else episode.ending
        reply = yield from ask(episode, "finish", ending, questions=asked)
        if reply.reward is not None and episode.ending not in FAILURES:
            # The episode's reward replaces those of its turns.
            episode.final_reward = reply.reward
            episode.clear_rewards()
            episode.add_reward(reply.reward)
    except (Ended, EnvironmentGone) as end:
        episode.ending, episode.error = end.args
    if all(row.aside for row in episode.rows):
        episode.rows.insert(0, Row(prompt_ids=[]))
    if asked is not None:
        asked.close()


@dataclass(kw_only=True)
class Context:
    """Holds what an episode's last row reads as.

    Attributes:
        conversation: joins the turns.
        reply: the messages that the policy read last.
        messages: those before them.
        turns: that the policy has taken in it.
        first_turn: the number of the first of these, among those that no environment asked for.
        last_turn: the number of the last of these.
    """

    conversation: Conversation
    reply: list[Message]
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    first_turn: int = 0
    last_turn: int = 0


@dataclass(kw_only=True)
class Playing:
    """Plays one attempt of an episode with an environment; arguments as of `play_episode`."""

    episode: Episode
    sampler: Sampler
    limits: TurnLimits
    tokens: TurnTokens
    tools: Tools
    history: HistoryRule | None
    questions: Questions | None
    branches: BranchRule | None = None
    context: Context = field(init=False)

    def take_turns(self) -> Generator[Request, Any, tuple[str, str]]:
        """Samples and steps until something ends the episode; returns the ending and the error."""
        episode = self.episode
        limits = self.limits
        try:
            reply = yield from self._ask("reset", episode.spec, episode.seed, episode.task)
            episode.reset_texts = reply.texts
            if not self._begin_episode(reply.messages):
                return "overflow", ""
            while True:
                turn = yield from self._take_turn(anchor_of(reply))
                if self._is_redrawn_alike():
                    return SAME, ""
                is_cut = turn.finish_reason == "length"
                if is_cut and self._room() <= 0:
                    if not (yield from self._leave_cut_turn(reply)):
                        return "overflow", ""
                    continue
                text = CutText(turn.text) if is_cut else turn.text
                reply = yield from self._ask("step", text)
                turn.reply = reply
                episode.add_reward(reply.reward or 0.0)
                if reply.done:
                    return "done", ""
                if limits.max_turn is not None and episode.num_played >= limits.max_turn:
                    return "max_turns", ""
                yield from self._go_on(turn, reply)
        except Ended as end:
            return end.args
        # The environment's words do not fit into the conversation.
        except TemplateRefusal as error:
            return "env_crash", str(error)

    def _ask(self, kind: Call, *args: Any) -> Generator[Request, StepReply, StepReply]:
        """Makes the environment answer a reset or a step, and keeps the state that it is in then.

        In a branch what stands in the record is not asked again where the environment is put into
        a state, and else must be answered as it was.

        Raises:
            Ended: it was answered otherwise.
        """
        episode = self.episode
        begin = episode.begin
        number = 0 if kind == "reset" else episode.num_played
        if begin is None or number >= len(begin.replies):
            reply = yield from ask(episode, kind, *args, questions=self.questions)
            yield from self._keep_state(reply)
            return reply
        if begin.restore is None:
            reply = yield from ask(episode, kind, *args, questions=self.questions)
            difference = begin.difference(number, reply)
            if difference:
                raise Ended(DIFFERS, difference)
        elif kind == "reset":
            yield from ask(
                episode, "restore", episode.spec, begin.restore.place, *begin.restore.args
            )
        return begin.replies[number]

    def _keep_state(self, reply: StepReply) -> Generator[Request, StepReply, None]:
        """Keeps the environment's state, if branches may begin in it; else "" stands for it."""
        if self.branches is None or self.episode.begin is not None or reply.done:
            return
        call = self.branches.keeps(self.episode)
        state = ""
        if call is not None:
            kept = yield from ask(self.episode, "visit", call.place, *call.args)
            state = kept.said
        self.episode.states.append(state)

    def _is_redrawn_alike(self) -> bool:
        """Checks whether a branch sampled in its first turn what its episode had sampled."""
        begin = self.episode.begin
        if begin is None or begin.own_ids is None or len(self.episode.turns) != begin.turn + 1:
            return False
        return self._last_ids() == list(begin.own_ids)

    def _begin_episode(self, messages: list[Message]) -> bool:
        """Begins the first row with the reset's messages; returns whether the prompt fits."""
        conversation = self.tokens.conversation(messages, self.tools)
        self.context = Context(conversation=conversation, reply=messages)
        return begin_row(self.episode, messages, conversation, self.limits)

    def _take_turn(self, anchor: str) -> Generator[Request, Completion, Turn]:
        """Samples a turn; `anchor` names the state in which it begins. Raises Ended."""
        asked_at = time.perf_counter()
        completion = yield from sample(self.episode, self.sampler, self.limits)
        engine_seconds = time.perf_counter() - asked_at
        turn = Turn(
            text=self.tokens.text(completion.token_ids),
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            anchor=anchor,
            engine_seconds=engine_seconds,
        )
        self.context.last_turn = len(self.episode.turns)
        self.episode.turns.append(turn)
        self.context.turns += 1
        return turn

    def _room(self) -> int:
        """Counts the tokens that the row, and the episode, may still take."""
        return min(self.limits.room(self.episode.row), self.limits.left(self.episode))

    def _go_on(self, turn: Turn, reply: StepReply) -> Generator[Request, Completion, None]:
        """Joins what answered a turn to the row, or begins a new context. Raises Ended."""
        context = self.context
        answer = {"role": "assistant", "content": turn.text}
        self.episode.messages += [answer, *reply.messages]
        context.messages += [*context.reply, answer]
        context.reply = reply.messages
        if reply.replaces_history:
            self._begin_context(NewContext(reply.messages, "environment"))
            return
        before = None if self.history is None else context.conversation.copy()
        joined = context.conversation.join(self._last_ids(), reply.messages)
        if before is not None and self.limits.left(self.episode) > 0:
            decision = yield from self._decide(self._standing(joined), before, anchor_of(reply))
            if decision is not None:
                self._begin_context(decision)
                return
        self._join(joined)

    def _last_ids(self) -> list[int]:
        """Lists the ids of the last turn."""
        return self.episode.row.sampled_in(self.context.last_turn)

    def _join(self, joined: Join) -> None:
        """Adds what follows a turn to the row. Raises Ended where there is no room.

        Where the template rewrites history it starts a new row.
        """
        rewritten_prompt = joined.rewritten
        if rewritten_prompt is None:
            is_full = len(joined.token_ids) >= self._room()
        else:
            is_full = len(rewritten_prompt) > self.limits.prompt_length
        if is_full:
            raise Ended("overflow", "")
        self.episode.row.append_tokens(joined.token_ids)
        if rewritten_prompt is not None:
            whole = [*self.context.messages, *self.context.reply]
            source = PromptSource(whole, self.tools)
            self.episode.rows.append(Row(prompt_ids=rewritten_prompt, source=source))

    # Contexts.

    def _leave_cut_turn(self, reply: StepReply) -> Generator[Request, Completion, bool]:
        """Begins a new context behind a turn that the context's end cut, to take it anew there.

        Returns whether one begins: not where the turn was the context's first, or the episode's
        limits are reached.
        """
        is_last = self.limits.max_turn is not None and (
            self.episode.num_played >= self.limits.max_turn
        )
        if self.history is None or self.context.turns == 1 or is_last:
            return False
        if self.limits.left(self.episode) <= 0:
            return False
        before = self.context.conversation.copy()
        decision = yield from self._decide(self._standing(None), before, anchor_of(reply))
        if decision is None:
            return False
        self._begin_context(decision)
        return True

    def _standing(self, joined: Join | None) -> Standing:
        """Returns what the history is shown.

        Args:
            joined: what follows the last turn; None: it was cut, and nothing does.
        """
        row = self.episode.row
        context = self.context
        tokens = len(row.prompt_ids) + len(row.ids)
        room = self.limits.room(row)
        turns = context.turns
        if joined is None:
            room = min(room, 0)
            turns -= 1
        elif joined.rewritten is not None:
            tokens = len(joined.rewritten)
            room = self.limits.room(Row(prompt_ids=joined.rewritten))
            if tokens > self.limits.prompt_length:
                room = min(room, 0)
        else:
            tokens += len(joined.token_ids)
            room -= len(joined.token_ids)
        seed = seed_for(self.episode.seed, 0, 0, self.episode.sample, context.first_turn)
        return Standing(
            task=list(self.episode.initial_messages),
            messages=list(context.messages),
            reply=list(context.reply),
            turns=turns,
            tokens=tokens,
            room=room,
            turn_tokens=self.limits.max_turn_tokens or 1,
            max_prompt=self.limits.prompt_length,
            seed=seed_beside(seed, "context"),
            count=self._count,
        )

    def _count(self, messages: list[Message]) -> int:
        """Counts the tokens of a prompt of these messages."""
        return len(self.tokens.history(messages, self.tools).prompt())

    def _decide(
        self, standing: Standing, conversation: Conversation, anchor: str
    ) -> Generator[Request, Completion, NewContext | None]:
        """Asks the history, and has the policy write what it asks for.

        Args:
            conversation: up to the turn before the last.
            anchor: names the state behind the last turn.

        Raises:
            Ended: a turn cannot be sampled, or the template refuses what is to be read.
        """
        assert self.history is not None
        try:
            answer = self.history.next_context(standing)
            if answer is None or isinstance(answer, NewContext):
                return answer
            writing = next(answer)
            while True:
                written = yield from self._write(writing, conversation, anchor)
                writing = answer.send(written)
        except StopIteration as end:
            decision: NewContext | None = end.value
            return decision
        except TemplateRefusal as error:
            raise Ended("env_crash", f"a new context is refused: {error}") from None

    def _write(
        self, writing: Writing, conversation: Conversation, anchor: str
    ) -> Generator[Request, Completion, Written]:
        """Has the policy write something behind the last turn; a turn that nobody answers."""
        episode = self.episode
        joined = conversation.join(self._last_ids(), writing.messages)
        row = episode.row
        added = len(joined.token_ids)
        if joined.rewritten is not None:
            whole = [*self.context.messages, *writing.messages]
            row = Row(prompt_ids=joined.rewritten, source=PromptSource(whole, self.tools))
        room = min(self.limits.whole_room(row), self.limits.left(episode)) - added
        if room <= 0 or len(row.prompt_ids) > self.limits.prompt_length:
            return Written("", 0)
        episode.row.append_tokens(joined.token_ids)
        if row is not episode.row:
            episode.rows.append(row)
        sampling = self.sampler(episode)
        max_tokens = min(room, sampling.max_tokens, writing.max_tokens)
        asked_at = time.perf_counter()
        completion = episode.taken_completion()
        if completion is None:
            completion = yield Sample(row.token_ids, copy_with(sampling, max_tokens=max_tokens))
        engine_seconds = time.perf_counter() - asked_at
        take_completion(episode, completion)
        turn = Turn(
            text=self.tokens.text(completion.token_ids),
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            anchor=f"{writing.purpose} {anchor}",
            asked=writing.messages,
            behind=self.context.last_turn,
            engine_seconds=engine_seconds,
            writes=writing.purpose,
            is_trained=writing.is_trained,
        )
        self.context.last_turn = len(episode.turns)
        episode.turns.append(turn)
        episode.messages += [*writing.messages, {"role": "assistant", "content": turn.text}]
        return Written(turn.text, turn.tokens)

    def _begin_context(self, new: NewContext) -> None:
        """Goes on in a new row with a prompt of these messages.

        Raises:
            Ended: it is too long, or the template refuses them.
        """
        context = self.context
        try:
            conversation = self.tokens.history(new.messages, self.tools)
            prompt = conversation.prompt()
        except TemplateRefusal as error:
            raise Ended(
                "env_crash", f"the new context ({new.reason}) is refused: {error}"
            ) from None
        if len(prompt) > self.limits.prompt_length:
            raise Ended("overflow", "")
        old = [*context.messages, *context.reply]
        row = self.episode.row
        seam = Seam(
            reason=new.reason,
            dropped=sum(1 for message in old if message not in new.messages),
            tokens=len(row.prompt_ids) + len(row.ids),
            fault=new.fault,
        )
        source = PromptSource(list(new.messages), self.tools)
        self.episode.rows.append(Row(prompt_ids=prompt, seam=seam, source=source))
        self.context = Context(
            conversation=conversation,
            reply=list(new.messages),
            # What the environment asked the policy for decides nothing here.
            first_turn=sum(not turn.aside for turn in self.episode.turns),
        )
