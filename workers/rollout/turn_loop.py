"""The one turn loop: single-turn, multi-turn and tools, over any engine and any env workers.

It resumes episodes (episode.py) with what they asked for. It is event-driven: as soon as an episode's turn is sampled
its environment steps, elsewhere, and as soon as that has answered the next turn is submitted, while the other episodes
go on generating. In lockstep all turns are awaited before the next are submitted, in a fixed order.

Invariant: every request is answered exactly once, and on all ranks of a tensor-parallel group in the same order.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch.distributed as dist

from data.turn_tokens import Tools, TurnTokens
from workers.environments.env_server import StepReply
from workers.environments.pool import EnvironmentPool
from workers.ranks.distributed import from_leader, is_leader
from workers.rollout.engine import Completion, Engine
from workers.rollout.episode import Ended, Episode, Play, Sample, Sampler, TurnLimits, play_episode

# Where the engine has nothing to do, replies are awaited for this many seconds at a time.
WAIT_S = 1.0
# An engine that runs whole batches (`completes_batches`) is given what there is once no reply has come for so many
# seconds.
LULL_S = 0.005


@dataclass(eq=False)
class TurnLoop:
    """Runs episodes to their end.

    Args:
        engine: what samples.
        sampler: of an episode's next turn; its `max_tokens` is a bound of the turn beside `limits`.
        limits: what ends a turn and an episode, for each environment spec.
        tokens: joins turns; None: every episode has its prompt already and ends with its first answer.
        environments: None with `tokens` None, and on all ranks of a `group` but its leader.
        tools: per environment spec, its tools' schemas.
        lockstep: all outstanding turns are awaited before the next are submitted, in a fixed order, so that the same
            inputs give the same batches.
        max_live: episodes at once; None: all.
        group: the tensor-parallel group, whose ranks share the engine; each runs this loop, and the leader, which is
            the first, tells the others what the environments answered.
    """

    engine: Engine
    sampler: Sampler
    limits: Sequence[TurnLimits]
    _: KW_ONLY
    tokens: TurnTokens | None = None
    environments: EnvironmentPool | None = None
    tools: Sequence[Tools] = (None,)
    lockstep: bool = False
    max_live: int | None = None
    group: dist.ProcessGroup | None = None
    # Running episodes by their number: their coroutines; which await the engine; which await their environment.
    plays: dict[int, Play] = field(default_factory=dict, init=False)
    sampling: set[int] = field(default_factory=set, init=False)
    stepping: set[int] = field(default_factory=set, init=False)
    started: dict[int, float] = field(default_factory=dict, init=False)

    def run(self, episodes: Sequence[Episode]) -> None:
        """Fills the episodes in; returns when every one has ended."""
        self.episodes = episodes
        self.waiting = deque(range(len(episodes)))
        self._admit()
        while self.plays or self.waiting:
            for key, reply in self._replies():
                self._resume(key, reply)
            for completion in self._completions():
                self._resume(int(completion.request_id), completion)
            self._admit()

    def _admit(self) -> None:
        """Starts episodes while there is room for them."""
        while self.waiting and (self.max_live is None or len(self.plays) < self.max_live):
            key = self.waiting.popleft()
            self.started[key] = time.perf_counter()
            episode = self.episodes[key]
            self.plays[key] = play_episode(episode, self.sampler, self.limits[episode.spec], self.tokens, self.tools)
            self._resume(key, None)

    def _resume(self, key: int, answer: StepReply | Completion | None) -> None:
        """Gives an episode what it asked for, and begins what it asks for next."""
        play = self.plays[key]
        for awaiting in (self.sampling, self.stepping):
            awaiting.discard(key)
        try:
            request = play.send(answer)
            while isinstance(request, Sample):
                try:
                    self.engine.submit(str(key), request.token_ids, request.sampling)
                    self.sampling.add(key)
                    return
                # This request is refused; the engine goes on.
                except (ValueError, RuntimeError) as error:
                    request = play.throw(Ended("engine_error", f"{type(error).__name__}: {error}"))
            self.stepping.add(key)
            if is_leader(self.group):
                getattr(self.environments, request.kind)(key, *request.args)
        except StopIteration:
            self._ended(key)

    def _completions(self) -> list[Completion]:
        """Advances the engine; in lockstep until all that is sampled is done."""
        if not self.sampling:
            return []
        done = self.engine.step()
        while self.lockstep and len(done) < len(self.sampling):
            done += self.engine.step()
        return sorted(done, key=lambda completion: int(completion.request_id)) if self.lockstep else done

    def _replies(self) -> list[tuple[int, StepReply]]:
        """Collects what the environments answered, and tells the other ranks of the group."""
        if not self.stepping:
            return []
        return from_leader(self._poll() if is_leader(self.group) else [], self.group)

    def _poll(self) -> list[tuple[int, StepReply]]:
        """Waits for replies where there is nothing else to do, in lockstep for all of them."""
        assert self.environments is not None
        replies = self.environments.poll(0.0 if self.sampling else WAIT_S)
        while (self.lockstep or self.engine.completes_batches) and len(replies) < len(self.stepping):
            late = self.environments.poll(WAIT_S if self.lockstep else LULL_S)
            if not (late or self.lockstep):
                break
            replies += late
        return sorted(replies, key=lambda reply: reply[0]) if self.lockstep else replies

    def _ended(self, key: int) -> None:
        """Has an episode that crashed start again, `max_refills` times at most."""
        del self.plays[key]
        episode = self.episodes[key]
        episode.seconds = time.perf_counter() - self.started[key]
        episode.first_error = episode.first_error or episode.error
        crashed = episode.ending in ("env_crash", "engine_error")
        if crashed and episode.attempt < self.limits[episode.spec].max_refills:
            episode.restart()
            self.waiting.append(key)
