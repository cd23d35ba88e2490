"""The turn loop: keeps an engine busy with the turns of many episodes.

The loop runs single turns, many turns and tools, over any engine and any environment workers: it
resumes episodes (episode_play.py) with what they asked for. It is event-driven: as soon as an
episode's turn is sampled its environment steps, elsewhere, and as soon as that has answered the
next turn is submitted, while the other episodes go on generating. In lockstep all turns are awaited
before the next are submitted, in a fixed order.

    waiting --_admit--> play_episode --Sample--> engine.submit ... engine.step --+
                             ^       --Ask-----> environments  ... poll ---------+
                             +------------------_resume--------------------------+

An episode in an environment has one request on its way, or the answers to what its environment
asks at once (`Samples`). A program (features/programs), which plays
by itself and asks for its turns, may have several turns sampled at the same time (`Several`), and
may be heard at any time. One thing holds for every episode: while none of its turns is sampled its
environment is awaited.

Invariant: every request that is not given up is answered exactly once, and on all ranks of a
tensor-parallel group in the same order.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch.distributed as dist

from data.play_counts import PLAYED
from data.protocol import DataProto
from data.turn_tokens import Tools, TurnTokens
from data.warn_once import warn_once
from data.watchdog import WATCHDOG, beat
from workers.environments.reply import Heard, Pool
from workers.ranks.process_groups import from_leader, is_leader
from workers.rollout.branches import BranchRule, branch_of
from workers.rollout.engine import Completion, Engine, VersionSpan, copy_with
from workers.rollout.episode import (
    Ask,
    Ended,
    Episode,
    Play,
    Player,
    Request,
    Sample,
    Sampler,
    Samples,
    TurnLimits,
)
from workers.rollout.episode_play import play_episode
from workers.rollout.history import HistoryRule
from workers.rollout.questions import QuestionRule

# Where the engine has nothing to do, replies are awaited for this many seconds at a time.
WAIT_S = 1.0
# An engine that runs whole batches (`completes_batches`) is given what there is once no reply has
# come for so many seconds.
LULL_S = 0.005
# Said once of a program whose requests come at the same time.
NOT_ONE_BY_ONE = (
    "trainer.deterministic=true: a program makes requests at the same time; which of them are "
    "sampled together depends on when they come, so that the last digits of log-probs may differ "
    "between runs"
)
# `max_refills` plays these again.
RESTARTED = ("env_crash", "engine_error")


@dataclass(eq=False)
class Batch:
    """Holds episodes that are played together; it has ended when none of them is left.

    Args:
        sampler: of an episode's next turn; its `max_tokens` is a bound of the turn beside `limits`.
        limits: what ends a turn and an episode, for each environment spec.
        branches: decides where branches of its episodes begin; None: there are none.

    Attributes:
        finish: makes rows of an ended batch; set by who needs it.
        left: episodes that have not ended.
        waiting: those that have not begun, or begin again, with their numbers in the loop.
        has_branches: branches are among them, or were.
    """

    episodes: Sequence[Episode]
    sampler: Sampler
    limits: Sequence[TurnLimits]
    branches: BranchRule | None = None
    finish: Callable[[], DataProto] = field(init=False)
    left: int = field(default=0, init=False)
    waiting: deque[tuple[Episode, int]] = field(default_factory=deque, init=False)
    has_branches: bool = field(default=False, init=False)


@dataclass(eq=False, slots=True)
class RunningEpisode:
    """Holds an episode that was begun, and the coroutine that plays it.

    Attributes:
        started_at: of time.perf_counter, in seconds.
        sampled: how many of its turns are being sampled.
    """

    play: Play
    episode: Episode
    batch: Batch
    started_at: float
    sampled: int = 0


@dataclass(eq=False)
class TurnLoop:
    """Runs batches of episodes to their end.

    Args:
        engine: what samples.
        tokens: joins turns; None: every episode has its prompt already and ends with its first
            answer.
        environments: None with `tokens` None, and on all ranks of a `group` but its leader.
        tools: per environment spec, its tools' schemas.
        programs: how episodes are played of those specs that are programs; others are played by
            `play_episode`.
        history: decides where these others begin a new context; None: nowhere.
        questions: answers what their environments ask the policy; None: that is refused.
        lockstep: all outstanding turns are awaited before the next are submitted, in a fixed order,
            and a batch begins when the one before it has ended, so that the same inputs give the
            same batches.
        max_live: episodes at once; None: all.
        group: the tensor-parallel group, whose ranks share the engine; each runs this loop, and the
            leader, which is the first, tells the others what the environments answered.

    Attributes:
        batches: those that have not ended, in the order in which they came.
        ended: those that have, and were not asked for yet.
        running: episodes that were begun, by their number.
        sampling: which episode and which of its turns a request of the engine's is, by its id.
        stepping: the numbers of those that await their environment.
        listening: the numbers of those that are programs.
        numbers: of episodes; they count on.
        out_of_time: the time that `play` was given is over, as the leader says.
    """

    engine: Engine
    _: KW_ONLY
    tokens: TurnTokens | None = None
    environments: Pool | None = None
    tools: Sequence[Tools] = (None,)
    programs: Mapping[int, Player] = field(default_factory=dict)
    history: HistoryRule | None = None
    questions: QuestionRule | None = None
    lockstep: bool = False
    max_live: int | None = None
    group: dist.ProcessGroup | None = None
    batches: list[Batch] = field(default_factory=list, init=False)
    ended: list[Batch] = field(default_factory=list, init=False)
    running: dict[int, RunningEpisode] = field(default_factory=dict, init=False)
    sampling: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    stepping: set[int] = field(default_factory=set, init=False)
    listening: set[int] = field(default_factory=set, init=False)
    numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    out_of_time: bool = field(default=False, init=False)

    # Called by the owner of a loop.

    def add(self, batch: Batch) -> None:
        """Takes a batch in, to be played with those that are there."""
        WATCHDOG.show(describe_unfinished, self)
        if is_leader(self.group):
            PLAYED.begin(self, len(batch.episodes))
        batch.left = len(batch.episodes)
        if batch.left:
            self.batches.append(batch)
        else:
            self.ended.append(batch)
        for episode in batch.episodes:
            batch.waiting.append((episode, next(self.numbers)))

    def run(self, batch: Batch) -> None:
        """Fills the batch's episodes in; returns when every one has ended."""
        self.add(batch)
        while batch.left:
            self._advance()
        self.ended.remove(batch)

    def play(self, seconds: float = math.inf, to_idle: bool = False) -> list[Batch]:
        """Goes on with all batches until some have ended, or for about so many seconds.

        With `to_idle` the engine must have nothing to sample, too.

        Returns:
            The batches that have ended.
        """
        until = time.perf_counter() + seconds
        self.out_of_time = False
        while self.batches and not self.out_of_time:
            awaits_engine = to_idle and self.sampling
            if self.ended and not awaits_engine:
                break
            self._advance(until)
        ended = self.ended
        self.ended = []
        return ended

    def drain(self) -> None:
        """Brings the running episodes to their end; those that wait go on waiting."""
        while self.running:
            self._advance(admits=False)

    # A turn of the loop.

    def _advance(self, until: float = math.inf, admits: bool = True) -> None:
        """Takes what environments and engine have for the episodes, and goes on with these."""
        if admits:
            self._admit()
        for key, reply in self._replies(until):
            self._resume(key, reply)
        for completion in self._completions():
            # Given up since, for what another completion brought about.
            if completion.request_id not in self.sampling:
                continue
            key, _ = self.sampling.pop(completion.request_id)
            self.running[key].sampled -= 1
            self._resume(key, completion)

    def _admit(self) -> None:
        """Starts episodes while there is room for them, those of earlier batches first."""
        admitted = self.batches[:1] if self.lockstep else list(self.batches)
        for batch in admitted:
            # What is cached of an episode serves its branches.
            if not self.running and not batch.has_branches:
                self.engine.begin()
            while batch.waiting and self._has_room():
                episode, key = batch.waiting.popleft()
                self._start(key, episode, batch)

    def _has_room(self) -> bool:
        return self.max_live is None or len(self.running) < self.max_live

    def _start(self, key: int, episode: Episode, batch: Batch) -> None:
        started_at = time.perf_counter()
        player: Player = partial(
            play_episode,
            history=self.history,
            questions=self.questions,
            branches=batch.branches,
        )
        if episode.spec in self.programs:
            player = self.programs[episode.spec]
            self.listening.add(key)
        limits = batch.limits[episode.spec]
        play = player(episode, batch.sampler, limits, self.tokens, self.tools)
        self.running[key] = RunningEpisode(play, episode, batch, started_at)
        self._resume(key, None)

    def _resume(self, key: int, answer: Heard | Completion | None) -> None:
        """Gives an episode what came for it, and begins what it asks for next."""
        beat("a turn was sampled or answered")
        if isinstance(answer, Completion) and not answer.versions:
            sampled_now = VersionSpan(self.engine.version, 0, len(answer.token_ids))
            answer = copy_with(answer, versions=(sampled_now,))
        if isinstance(answer, Completion):
            self._count(answer)
        running = self.running[key]
        self.stepping.discard(key)
        try:
            refusal = self._begin(key, running.play.send(answer))
            while refusal is not None:
                refusal = self._begin(key, running.play.throw(refusal))
        except StopIteration:
            self._end(key)
            return
        if not running.sampled:
            self.stepping.add(key)

    def _begin(self, key: int, request: Request) -> Ended | None:
        """Begins what an episode asks for; returns how it ends where the engine refuses a turn."""
        if isinstance(request, Sample):
            return self._submit(key, request)
        if isinstance(request, Samples):
            return self._submit_all(key, request.samples)
        if isinstance(request, Ask):
            self._ask_environment(key, request)
            return None
        for number in request.dropped:
            self._drop(key, number)
        for ask in request.asks:
            self._ask_environment(key, ask)
        if request.sample is not None:
            return self._submit(key, request.sample)
        return None

    def _count(self, turn: Completion) -> None:
        """Counts a turn's tokens, once in the engine's group, unless the engine has done it."""
        if is_leader(self.group) and not self.engine.counts_tokens:
            PLAYED.tokens += len(turn.token_ids)

    def _submit(self, key: int, request: Sample) -> Ended | None:
        """Submits a turn; returns how its episode ends where the engine refuses it."""
        request_id = request_name(key, request.number)
        try:
            self.engine.submit(request_id, request.token_ids, request.sampling)
        # This request is refused; the engine goes on.
        except (ValueError, RuntimeError) as error:
            return Ended("engine_error", f"{type(error).__name__}: {error}")
        self.sampling[request_id] = (key, request.number)
        self.running[key].sampled += 1
        if self.lockstep and key in self.listening and self.running[key].sampled > 1:
            warn_once(__name__, NOT_ONE_BY_ONE)
        return None

    def _submit_all(self, key: int, samples: Sequence[Sample]) -> Ended | None:
        """Submits several turns; where the engine refuses one the others are given up."""
        for count, sample in enumerate(samples):
            refusal = self._submit(key, sample)
            if refusal is not None:
                for submitted in samples[:count]:
                    self._drop(key, submitted.number)
                return refusal
        return None

    def _drop(self, key: int, number: int) -> None:
        """Gives a turn up that is being sampled."""
        request_id = request_name(key, number)
        if self.sampling.pop(request_id, None) is not None:
            self.running[key].sampled -= 1
            self.engine.abort(request_id)

    def _ask_environment(self, key: int, request: Ask) -> None:
        """Begins a call of the pool, on the leader."""
        if is_leader(self.group):
            call = getattr(self.environments, request.kind)
            call(key, *request.args)

    def _completions(self) -> list[Completion]:
        """Advances the engine; in lockstep until all that is sampled is done."""
        if not self.sampling:
            return []
        done = self._step_engine()
        if self.lockstep:
            while len(done) < len(self.sampling):
                done += self._step_engine()
            done = sorted(done, key=lambda completion: self.sampling[completion.request_id])
        return done

    def _step_engine(self) -> list[Completion]:
        """Makes a step of the engine; returns what finished and was not given up."""
        return [done for done in self.engine.step() if done.request_id in self.sampling]

    def _replies(self, until: float) -> list[tuple[int, Heard]]:
        """Collects what the environments answered, and whether the time is over.

        The leader tells the other ranks of the group.
        """
        awaited = self.stepping or self.listening
        if not awaited and until == math.inf:
            return []
        leaders: tuple[list[tuple[int, Heard]], bool] | None = None
        if is_leader(self.group):
            replies = self._poll(until) if awaited else []
            leaders = (replies, time.perf_counter() >= until)
        replies, self.out_of_time = from_leader(leaders, self.group)
        return replies

    def _poll(self, until: float) -> list[tuple[int, Heard]]:
        """Waits for replies where there is nothing else to do, in lockstep for all of them."""
        assert self.environments is not None
        wait_s = 0.0
        if not self.sampling:
            wait_s = min(WAIT_S, max(until - time.perf_counter(), 0.0))
        replies = self.environments.poll(wait_s)
        if self.lockstep:
            while not self._has_heard_all(replies):
                replies += self.environments.poll(WAIT_S)
            if self.listening:
                # Requests of a program at the same time belong to the same round.
                replies += self._until_lull()
            return sorted(replies, key=lambda reply: (reply[0], reply[1].order))
        if self.engine.completes_batches and not self._has_heard_all(replies):
            replies += self._until_lull(most=len(self.stepping) - len(replies))
        return replies

    def _has_heard_all(self, replies: Sequence[tuple[int, Heard]]) -> bool:
        """Checks whether each episode that is awaited is among those that replied."""
        if len(replies) < len(self.stepping):
            return False
        return not self.listening or self.stepping.issubset(key for key, _ in replies)

    def _until_lull(self, most: float = math.inf) -> list[tuple[int, Heard]]:
        """Returns what else is said, up to `most` replies, until nothing is for LULL_S seconds."""
        assert self.environments is not None
        replies: list[tuple[int, Heard]] = []
        while len(replies) < most:
            later = self.environments.poll(LULL_S)
            if not later:
                break
            replies += later
        return replies

    def _end(self, key: int) -> None:
        """Ends an episode; one that crashed starts again, `max_refills` times at most."""
        running = self.running.pop(key)
        self.listening.discard(key)
        episode = running.episode
        batch = running.batch
        episode.seconds = time.perf_counter() - running.started_at
        episode.first_error = episode.first_error or episode.error
        max_refills = batch.limits[episode.spec].max_refills
        if episode.ending in RESTARTED and episode.attempt < max_refills:
            episode.restart()
            batch.waiting.append((episode, key))
            return
        if batch.branches is not None and episode.begin is None:
            self._branch(episode, batch)
        batch.left -= 1
        if is_leader(self.group):
            PLAYED.ended += 1
        if not batch.left:
            self.batches.remove(batch)
            self.ended.append(batch)

    def _branch(self, episode: Episode, batch: Batch) -> None:
        """Has the branches of an episode that has ended played in its batch."""
        assert batch.branches is not None
        for begin in batch.branches.begins(episode):
            branch = branch_of(episode, begin)
            episode.branches.append(branch)
            batch.waiting.append((branch, next(self.numbers)))
            batch.left += 1
            batch.has_branches = True
            if is_leader(self.group):
                PLAYED.episodes += 1


def request_name(key: int, number: int) -> str:
    """Names an episode's turn for the engine; the number is 0 where it has one at a time."""
    return f"{key}.{number}" if number else str(key)


def is_asked_aside(request_id: str) -> bool:
    """Returns whether an engine's request is one of several that an episode may have at a time."""
    return "." in request_id


def describe_unfinished(loop: TurnLoop) -> str:
    """Describes a loop that stands still: what waits for what, and the oldest episode's end."""
    keys = sorted({key for key, _ in loop.sampling.values()})
    queue = {key: len(loop.running[key].episode.row.token_ids) for key in keys}
    waiting = sum(len(batch.waiting) for batch in loop.batches)
    lines = [
        f"the engine's queue: {len(loop.sampling)} turns; tokens by episode: {queue}",
        f"with environments: episodes {sorted(loop.stepping)}",
        f"not begun: {waiting} episodes",
    ]
    if loop.running:
        oldest = min(loop.running, key=lambda key: loop.running[key].started_at)
        lines.append(f"the oldest: {describe_running(oldest, loop.running[oldest])}")
    return "\n".join(lines)


def describe_running(key: int, running: RunningEpisode) -> str:
    """Describes a running episode by its environment, its age and its last turn."""
    episode = running.episode
    age = time.perf_counter() - running.started_at
    last_turn = episode.turns[-1] if episode.turns else "it has none"
    return (
        f"episode {key} (environment {episode.spec}, seed {episode.seed}, "
        f"attempt {episode.attempt}), "
        f"begun {age:.0f} s ago, {len(episode.turns)} turns, the last: {last_turn}"
    )
