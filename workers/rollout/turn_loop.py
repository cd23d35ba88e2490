"""The one turn loop: single-turn, multi-turn and tools, over any engine and any home of the environments.

Event-driven: as soon as an episode's turn is sampled its environment steps, elsewhere, and as soon as the environment has answered the next turn is
submitted, while the other episodes go on generating. In `rounds` all turns are awaited before the next are submitted, in a fixed order.

    token_ids     = P0 P1 | A0 A1 A2 | E0 E1 | A3 A4        P: prompt, A: sampled, E: the environment's reply
    response_mask =         1  1  1    0  0    1  1
    turn_ids      =         0  0  0   -1 -1    1  1

Invariants: what the policy sampled is kept as ids; what the engine sees at a turn is what the row holds so far. A template that rewrites history
continues the episode in a new row. Which limit ends what:

    limit                  is reached                              then
    max_turn_tokens        inside a turn                           the turn is closed (its end-of-turn token gets mask 0) and played
    response_length, or    inside a turn, or no room for the next  the episode ends as `overflow` with what it has; a turn that was cut is not
    max_model_len                                                  played, since its action is not whole
    prompt_length          by a first prompt, or a rewritten one   `overflow`
    max_turn               after a turn was played                 `max_turns`
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch.distributed as dist

from data.turn_tokens import TemplateRefusal, TurnTokens
from workers.environments.pool import Reply
from workers.rollout.engine import Completion, Engine, Sampling

FAILURES = ("env_crash", "env_timeout", "engine_error")
ENDINGS = ("done", "max_turns", "overflow", *FAILURES)
WAIT_S = 1.0  # for which replies are awaited at a time where the engine has nothing to do
LULL_S = 0.005  # without a reply, after which an engine that completes whole batches is given those there are


@dataclass(kw_only=True)
class Row:
    """One training row while it grows; `prompt_ids` never changes, the other lists grow together."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    def append_sampled(self, completion: Completion, turn: int) -> None:
        self._append(completion.token_ids, 1, completion.log_probs, turn)

    def append_given(self, token_ids: list[int]) -> None:
        self._append(token_ids, 0, [0.0] * len(token_ids), -1)

    def _append(self, ids: list[int], mask: int, log_probs: list[float], turn: int) -> None:
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.log_probs += log_probs
        self.turn_ids += [turn] * len(ids)
        self.rewards += [0.0] * len(ids)

    def add_reward(self, reward: float) -> None:
        """To the last sampled token; the row must have one."""
        last = len(self.response_mask) - 1 - self.response_mask[::-1].index(1)
        self.rewards[last] += reward


@dataclass(kw_only=True)
class Turn:
    """What happened in one turn, for the records."""

    text: str = ""
    reward: float = 0.0
    finish_reason: str = ""
    observation: list[dict[str, Any]] = field(default_factory=list)
    done: bool | None = None  # None: the environment did not answer, or was not asked
    env_seconds: float = 0.0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class Episode:
    """One conversation, which `opening` begins. `spec` is the environment's index, `seed` its seed; `attempt` counts restarts after a crash."""

    group: int
    sample: int
    spec: int = 0
    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    opening: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn: int = 0
    attempt: int = 0
    ending: str = ""
    error: str = ""
    env_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def row(self) -> Row:
        return self.rows[-1]

    def add_reward(self, reward: float) -> None:
        """To the last token that the policy sampled, in whichever row; dropped where it sampled none."""
        rows = [row for row in self.rows if 1 in row.response_mask]
        if rows:
            rows[-1].add_reward(reward)

    def restart(self) -> None:
        self.rows, self.opening, self.messages, self.turns = [], [], [], []
        self.turn, self.attempt, self.ending, self.error = 0, self.attempt + 1, "", ""


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """In tokens, but for `max_turn` (turns of an episode) and `max_refills` (restarts of an episode that crashed)."""

    prompt_length: int
    response_length: int
    max_model_len: int
    max_turn: int | None = None
    max_turn_tokens: int | None = None
    max_refills: int = 0


class Environments(Protocol):
    """What the loop asks of the environments' home: calls that do not block, and `poll` for their answers."""

    def reset(self, key: int, spec_index: int, seed: int) -> None: ...
    def step(self, key: int, text: str) -> None: ...
    def finish(self, key: int, ending: str) -> None: ...
    def poll(self, timeout: float) -> list[Reply]: ...


class TurnLoop:
    """Runs episodes to their end.

    Args:
        engine: what samples.
        sampling: of an episode's next turn; its `max_tokens` is a bound of the turn beside `limits`.
        limits: what ends a turn and an episode.
        tokens: joins turns; None with `environments` None.
        environments: None: every episode has its prompt already and ends with its first answer. With a `group`, only its first rank has any.
        tools: per environment spec, its tools' schemas.
        rounds: turns are admitted in fixed rounds, so that the same inputs give the same batches.
        max_live: episodes at once; None: all.
        group: ranks that share the engine (tensor parallelism); each runs this loop, and the first tells the others what the environments answered.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Callable[[Episode], Sampling],
        limits: TurnLimits,
        *,
        tokens: TurnTokens | None = None,
        environments: Environments | None = None,
        tools: Sequence[list[dict[str, Any]] | None] = (None,),
        rounds: bool = False,
        max_live: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine, self.sampling, self.limits = engine, sampling, limits
        self.tokens, self.environments, self.tools = tokens, environments, tools
        self.rounds, self.max_live, self.group = rounds, max_live, group
        self.plays = tokens is not None
        self.leads = group is None or dist.get_rank(group) == 0
        self.running: set[int] = set()  # episodes whose turn is being sampled
        self.playing: set[int] = set()  # episodes whose environment works
        self.started: dict[int, float] = {}

    def run(self, episodes: Sequence[Episode]) -> None:
        """Fills the episodes in; returns when every one has ended."""
        self.episodes = episodes
        self.waiting = deque(range(len(episodes)))
        self._admit()
        while self.running or self.playing or self.waiting:
            for reply in self._replies():
                self._on_reply(reply)
            for completion in self._completions():
                self._on_completion(completion)
            self._admit()

    # What comes in

    def _admit(self) -> None:
        """Starts episodes while there is room for them."""
        while self.waiting and (self.max_live is None or len(self.running) + len(self.playing) < self.max_live):
            key = self.waiting.popleft()
            self.started[key] = time.perf_counter()
            if self.plays:
                self._ask("reset", key, self.episodes[key].spec, self.episodes[key].seed)
            else:
                self._submit(key)

    def _completions(self) -> list[Completion]:
        if not self.running:
            return []
        done = self.engine.step()
        while self.rounds and len(done) < len(self.running):
            done += self.engine.step()
        return sorted(done, key=lambda completion: int(completion.request_id)) if self.rounds else done

    def _replies(self) -> list[Reply]:
        """What the environments answered; waits where there is nothing else to do, in rounds for all of them."""
        if not self.playing:
            return []
        replies: list[Reply] = []
        if self.leads:
            assert self.environments is not None
            replies = self.environments.poll(0.0 if self.running else WAIT_S)
            while self.rounds and len(replies) < len(self.playing):
                replies += self.environments.poll(WAIT_S)
            while self.engine.completes_batches and len(replies) < len(self.playing):
                if not (late := self.environments.poll(LULL_S)):
                    break
                replies += late
            if self.rounds:
                replies.sort(key=lambda reply: reply.key)
        if self.group is not None:
            box: list[Any] = [replies]
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
            replies = box[0]
        return replies

    def _ask(self, verb: str, key: int, *args: Any) -> None:
        self.playing.add(key)
        if self.leads:
            getattr(self.environments, verb)(key, *args)

    # What follows from it

    def _on_reply(self, reply: Reply) -> None:
        self.playing.discard(reply.key)
        episode = self.episodes[reply.key]
        episode.env_seconds += reply.seconds
        if reply.kind == "finish":
            self._finished(episode, reply)
        elif reply.failure:  # its environment is gone
            episode.ending, episode.error = reply.failure, reply.error
            self._ended(reply.key)
        else:
            try:
                (self._begin if reply.kind == "reset" else self._played)(reply.key, reply)
            except TemplateRefusal as error:  # of what the environment said
                self._give_up(reply.key, "env_crash", str(error))

    def _begin(self, key: int, reply: Reply) -> None:
        assert self.tokens is not None
        episode = self.episodes[key]
        episode.opening, episode.messages = reply.messages, list(reply.messages)
        prompt = self.tokens.prompt(episode.messages, self.tools[episode.spec])
        if len(prompt) > self.limits.prompt_length:
            episode.rows.append(Row(prompt_ids=prompt[: self.limits.prompt_length]))
            self._end(key, "overflow")
            return
        episode.rows.append(Row(prompt_ids=prompt))
        self._submit(key)

    def _submit(self, key: int) -> None:
        """The next turn, if there is room for a token of it."""
        episode = self.episodes[key]
        sampling = self.sampling(episode)
        room = self._room(episode.row)
        if room <= 0:
            self._end(key, "overflow")
            return
        most = min(room, sampling.max_tokens, self.limits.max_turn_tokens or room)
        try:
            self.engine.submit(str(key), episode.row.token_ids, replace(sampling, max_tokens=most))
        except (ValueError, RuntimeError) as error:  # this request is refused; the engine goes on
            self._give_up(key, "engine_error", f"{type(error).__name__}: {error}")
            return
        self.running.add(key)

    def _room(self, row: Row) -> int:
        held = len(row.response_ids)
        return min(self.limits.response_length - held, self.limits.max_model_len - len(row.prompt_ids) - held)

    def _on_completion(self, completion: Completion) -> None:
        key = int(completion.request_id)
        self.running.discard(key)
        episode = self.episodes[key]
        if completion.finish_reason == "abort":
            self._give_up(key, "engine_error", "the engine aborted the request")
            return
        episode.row.append_sampled(completion, episode.turn)
        if not self.plays:
            episode.ending = completion.finish_reason
            return
        assert self.tokens is not None
        text = self.tokens.text(completion.token_ids)
        episode.turns.append(Turn(text=text, finish_reason=completion.finish_reason))
        if completion.finish_reason == "length" and self._room(episode.row) <= 0:
            self._end(key, "overflow")
        else:
            self._ask("step", key, text)

    def _played(self, key: int, reply: Reply) -> None:
        episode = self.episodes[key]
        turn = episode.turns[-1]
        turn.reward, turn.done, turn.env_seconds = reply.reward, reply.done, reply.seconds
        turn.observation = reply.messages
        turn.tool_calls = list(reply.info.get("tool_calls", ()))
        episode.row.add_reward(reply.reward)
        episode.turn += 1
        if reply.done:
            self._end(key, "done")
        elif self.limits.max_turn is not None and episode.turn >= self.limits.max_turn:
            self._end(key, "max_turns")
        elif self._continue(episode, reply.messages):
            self._submit(key)
        else:
            self._end(key, "overflow")

    def _continue(self, episode: Episode, new: list[dict[str, Any]]) -> bool:
        """Joins the environment's messages to the row, or opens a new row where the template rewrites history; False: no room."""
        assert self.tokens is not None
        row, answer = episode.row, {"role": "assistant", "content": episode.turns[-1].text}
        sampled = row.response_ids[row.turn_ids.index(episode.turn - 1) :]
        join = self.tokens.join(episode.messages, sampled, new, self.tools[episode.spec])
        episode.messages += [answer, *new]
        if join.rewritten is None:
            if len(join.token_ids) >= self._room(row):
                return False
            row.append_given(join.token_ids)
            return True
        if len(join.rewritten) > self.limits.prompt_length:
            return False
        episode.rows.append(Row(prompt_ids=join.rewritten))
        return True

    # Endings

    def _end(self, key: int, ending: str) -> None:
        self.episodes[key].ending = ending
        self._ask("finish", key, ending)

    def _give_up(self, key: int, failure: str, error: str) -> None:
        """Ends an episode that failed while its environment is well."""
        self.episodes[key].error = error
        if self.plays:
            self._end(key, failure)
        else:
            self.episodes[key].ending = failure
            self._ended(key)

    def _finished(self, episode: Episode, reply: Reply) -> None:
        """The environment is given back. What a reward function says replaces the environment's rewards; if it failed, so did the episode."""
        if reply.failure:
            episode.ending, episode.error = reply.failure, reply.error
        elif reply.info.get("has_reward") and episode.ending not in FAILURES:
            for row in episode.rows:
                row.rewards = [0.0] * len(row.rewards)
            episode.add_reward(reply.reward)
        self._ended(reply.key)

    def _ended(self, key: int) -> None:
        """A crash starts the episode again, `max_refills` times at most."""
        episode = self.episodes[key]
        episode.seconds = time.perf_counter() - self.started[key]
        crashed = episode.ending in ("env_crash", "engine_error")
        if crashed and episode.attempt < self.limits.max_refills:
            episode.restart()
            self.waiting.append(key)
        elif not episode.rows:
            episode.rows.append(Row(prompt_ids=[]))
