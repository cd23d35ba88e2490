"""Says where branches of an episode begin: the rule that the turn loop asks.

    at=every, samples=2, an episode of three turns      s0     s1     s2
                                                        |  A0  |  A1  |  A2
    branches (with rollout.n above 1 none at s0)            1.0,1.1 2.0,2.1

Invariant: what is decided follows from the episode, the config and the run's seeds alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.protocol import DataProto
from data.seeds import seed_beside, seed_for
from features.branching.measured import measure
from features.branching.proof import KINDS, STATES, Proved, prove, refusal, tell
from features.branching.settings import BranchingSettings
from features.branching.states import MEGABYTE, REFUSAL
from features.branching.trained import BRANCH_ROWS, TREE, counted_branches, trained_branches
from training.config import PPOConfig
from training.core_algos.branch_advantages import drawn_turn_weights
from training.run.abort_policy import EnvironmentsFail
from workers.environments.reply import StepReply
from workers.ranks.process_groups import from_leader, is_leader
from workers.rollout.begin import Begin, Restore
from workers.rollout.branches import BranchRule
from workers.rollout.engine import Completion, FinishReason, VersionSpan
from workers.rollout.episode import FAILURES, Episode
from workers.rollout.failure_policy import is_masked
from workers.rollout.history import KEEP

if TYPE_CHECKING:
    import torch.distributed as dist

    from workers.rollout.kinds import EpisodeSpec

REDRAWING = "vine_redraw"
# Estimators that need this compare a first turn with the group's other episodes.
GROUP = "index"


def open_branches(
    config: PPOConfig, specs: Sequence[EpisodeSpec], group: dist.ProcessGroup | None
) -> BranchSampling | None:
    """Opens the rule; None where branching.at=never."""
    settings = config.section(BranchingSettings)
    if not settings.is_on:
        return None
    return BranchSampling(config, settings, specs, group)


class BranchSampling(BranchRule):
    """Has the states of episodes continued from, as the settings say.

    Args:
        specs: who plays. group: the ranks that share the engine.
    """

    def __init__(
        self,
        config: PPOConfig,
        settings: BranchingSettings,
        specs: Sequence[EpisodeSpec],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.specs = list(specs)
        self.group = group
        # By the number of a spec.
        self.proved: dict[int, Proved] = {}
        common = config.algorithm.adv_estimator == REDRAWING
        if settings.random_numbers is not None:
            common = settings.random_numbers == "common"
        self.is_common = common

    # Before episodes are played.

    def prepare(self, described: DataProto) -> None:
        """Proves the states of environments that are to be played for the first time.

        Raises:
            EnvironmentsFail: those of one cannot be had again.
        """
        columns = described.non_tensor_batch
        for row, spec in enumerate(columns["agent_index"].tolist()):
            if spec in self.proved:
                continue
            task = columns["task"][row] if "task" in columns else None
            self.proved[spec] = self._prove(spec, int(columns["env_seed"][row]), task)

    def _prove(self, spec: int, seed: int, task: Any) -> Proved:
        """Has the leader try an environment, with the seed and the task of an episode to come."""
        found: Proved | None = None
        if is_leader(self.group):
            found = prove(self.config, self.specs[spec], self.settings, seed, task)
        proved = Proved(*from_leader(found and tuple(found), self.group))
        if not proved.way:
            raise EnvironmentsFail(refusal(self.specs[spec], proved, self.settings))
        tell(self.specs[spec], proved, self.settings)
        return proved

    def keeps(self, episode: Episode) -> Restore | None:
        """Names what takes a state, where states are not played again, and it may be needed."""
        way = self.proved[episode.spec].way
        if way not in KINDS or not self._may_begin_at(len(episode.turns)):
            return None
        return Restore(f"{STATES}:take", (way, self.settings.max_state_mb * MEGABYTE))

    def _may_begin_at(self, turn: int) -> bool:
        """Checks whether branches may begin at a turn, as far as is known before it is played."""
        if self.config.agent.context != KEEP:
            # Turns that write a summary may come before the one that the environment is asked for.
            return True
        if self.settings.numbered:
            return turn in self.settings.numbered
        return turn > 0 or not self._group_begins_first_turn

    # Behind an episode's end.

    def begins(self, episode: Episode) -> Sequence[Begin]:
        """Says where branches begin: at turns of an episode that is trained on."""
        failed = episode.ending in FAILURES
        if failed and is_masked(episode.ending, self.config.agent):
            return ()
        prefix = completions_of(episode)
        replies = replies_of(episode)
        begins = []
        for turn in self.turns_of(episode):
            asked = sum(1 for before in episode.turns[:turn] if not before.writes)
            if not self._has_state(episode, asked):
                continue
            for number in range(self.settings.samples):
                word = f"{turn}.{number}"
                begins.append(
                    Begin(
                        prefix=prefix[:turn],
                        replies=replies[: asked + 1],
                        restore=self._restore(episode, asked, word),
                        word=word,
                        redraws_one=self.is_common,
                        own_ids=prefix[turn].token_ids if self.is_common else None,
                        attempt=episode.attempt if self.is_common else 0,
                        max_tokens=self.settings.max_tokens,
                    )
                )
        return begins

    def _has_state(self, episode: Episode, number: int) -> bool:
        """Checks whether the state before a turn can be had again."""
        if self.proved[episode.spec].way not in KINDS:
            return True
        state = episode.states[number] if number < len(episode.states) else ""
        return bool(state) and not state.startswith(REFUSAL)

    def _restore(self, episode: Episode, number: int, word: str) -> Restore | None:
        """Says how an environment is put into a state; None: it plays the turns again."""
        way = self.proved[episode.spec].way
        if way not in KINDS:
            return None
        luck_seed = None
        if self.settings.luck == "fresh":
            own = seed_for(episode.seed, 0, episode.group, episode.sample, None, word)
            luck_seed = seed_beside(own, "luck")
        return Restore(f"{STATES}:put", (way, episode.states[number], luck_seed))

    def turns_of(self, episode: Episode) -> list[int]:
        """Lists the turns whose states are continued from, in order."""
        played = len(episode.turns)
        if not played:
            return []
        turns = set(range(played))
        if self.settings.numbered:
            turns &= set(self.settings.numbered)
        elif self.settings.at == ("last",):
            turns = {played - 1}
        elif self.draws_a_turn:
            drawn, _ = self.drawn(episode)
            # A redraw judges the turn alone; else the state behind it is worth something, too.
            turns = {drawn} if self.is_common else {drawn, drawn + 1} & turns
        if self._group_begins_first_turn:
            turns.discard(0)
        return sorted(turns)

    @property
    def _group_begins_first_turn(self) -> bool:
        """Returns whether the group's episodes are the continuations of the first turn's state."""
        if self.settings.numbered or self.settings.first_turn:
            return False
        is_compared = GROUP in self.config.estimator_needs
        return is_compared and self.config.actor_rollout_ref.rollout.n > 1

    @property
    def draws_a_turn(self) -> bool:
        """Returns whether one turn of each episode is drawn."""
        return self.settings.at in (("random",), ("entropy",))

    def drawn(self, episode: Episode) -> tuple[int, float]:
        """Draws a turn of an episode; returns its number and the chance of drawing it."""
        weights = [1.0] * len(episode.turns)
        if self.settings.at == ("entropy",):
            weights = surprises(episode)
        own = seed_for(episode.seed, self.settings.seed, episode.group, episode.sample)
        draw = random.Random(f"branching {own}")
        (turn,) = draw.choices(range(len(weights)), weights)
        return turn, weights[turn] / sum(weights)

    # For the batch.

    def columns(self, episodes: Sequence[Episode]) -> Mapping[str, Sequence[Any]]:
        """Returns what continuations earned, and the weights of turns where one was drawn."""
        turn_gamma = self.config.algorithm.turn_gamma
        columns: dict[str, list[Any]] = {
            "branch_returns": [
                measure(episode, self.config.agent, turn_gamma).returns for episode in episodes
            ]
        }
        if self.draws_a_turn:
            columns["turn_weights"] = [self._weights(episode) for episode in episodes]
        if self.settings.train:
            columns |= self._trained_columns(episodes)
        return columns

    def _trained_columns(self, episodes: Sequence[Episode]) -> dict[str, list[Any]]:
        """Returns what is trained on of continuations, and the weights of the episodes' turns."""
        algorithm = self.config.algorithm
        columns: dict[str, list[Any]] = {"turn_weights": [], BRANCH_ROWS: []}
        for episode in episodes:
            found = counted_branches(
                episode,
                self.config.agent,
                self.settings.samples,
                numbered=self.settings.numbered or None,
                first=1 if self._group_begins_first_turn else 0,
            )
            tree = algorithm.adv_estimator == TREE
            columns["turn_weights"].append(found.weights(len(episode.turns), tree))
            columns[BRANCH_ROWS].append(
                trained_branches(found, algorithm.adv_estimator, algorithm.turn_gamma)
            )
        return columns

    def _weights(self, episode: Episode) -> list[float]:
        """Weighs an episode's turns: the drawn one by its chance, the others by 0."""
        if not episode.turns:
            return []
        turn, chance = self.drawn(episode)
        return drawn_turn_weights(len(episode.turns), turn, chance)


def completions_of(episode: Episode) -> list[Completion]:
    """Returns the completion of each turn of an episode, from its rows."""
    ids: list[list[int]] = [[] for _ in episode.turns]
    log_probs: list[list[float]] = [[] for _ in episode.turns]
    versions: list[list[VersionSpan]] = [[] for _ in episode.turns]
    for row in episode.rows:
        for span in row.spans:
            start = len(ids[span.turn])
            ids[span.turn] += row.ids[span.start : span.end]
            log_probs[span.turn] += row.log_probs[span.start : span.end]
            versions[span.turn].append(VersionSpan(span.version, start, len(ids[span.turn])))
    completions = []
    for number, turn in enumerate(episode.turns):
        reason: FinishReason = "length" if turn.finish_reason == "length" else "stop"
        completions.append(
            Completion(
                request_id="",
                token_ids=ids[number],
                log_probs=log_probs[number],
                finish_reason=reason,
                versions=tuple(versions[number]),
            )
        )
    return completions


def replies_of(episode: Episode) -> list[StepReply]:
    """Returns what the environment said: to the reset, and to each turn that it was asked for."""
    anchor = episode.turns[0].anchor if episode.turns else None
    first = StepReply(messages=episode.initial_messages, texts=episode.reset_texts, anchor=anchor)
    replies = [first]
    for turn in episode.turns:
        if turn.reply is not None:
            replies.append(turn.reply)
    return replies


def surprises(episode: Episode) -> list[float]:
    """Measures how unsure the policy was at each turn: nats a token that it was surprised by.

    They stand for the entropy, whose estimate they are; all are above 0.
    """
    sums = [0.0] * len(episode.turns)
    counts = [0] * len(episode.turns)
    for row in episode.rows:
        for span in row.spans:
            sums[span.turn] -= sum(row.log_probs[span.start : span.end])
            counts[span.turn] += span.end - span.start
    return [max(total / max(count, 1), 1e-3) for total, count in zip(sums, counts, strict=True)]
