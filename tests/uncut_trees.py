"""Made-up episodes as trees of turns, and any cut of them into rows of a batch.

A turn stands behind the turn whose words it goes on from, or begins a conversation of its own (a
helper's, or what a summary begins). Its path is all that the policy read before it, and it does not
depend on how the episode is cut:

    tree    P A0 - E0 A1 - E1 A2       a cut   row 0   prompt P         response A0 E0 A1
                 \\ F0 A3                       row 1   prompt P A0 E0 A1 E1   response A2
                                               row 2   prompt P         response A0 F0 A3

In a row those turns have mask 1 that are trained there: A0 in row 0 alone. Everything else that a
row holds is on the paths of its turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from data.array_ops import object_array
from data.protocol import DataProto

VOCABULARY = 48
PROMPT_WIDTH = 64
RESPONSE_WIDTH = 64
NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn: what the policy was given behind the turn `parent` (-1: none), and its answer."""

    parent: int
    given: list[int]
    sampled: list[int]
    reward: float
    state: str
    engine_noise: list[float]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A tree of turns, in the order in which they were taken."""

    name: str
    group: str
    role: str
    baseline: float
    infos: dict[str, float]
    turns: list[Turn] = field(default_factory=list)

    def chain(self, turn: int) -> list[int]:
        """The turns on a turn's path, itself the last."""
        chain = []
        while turn != NOBODY:
            chain.append(turn)
            turn = self.turns[turn].parent
        return chain[::-1]

    def path(self, turn: int) -> tuple[list[int], dict[int, slice]]:
        """The tokens up to a turn's end, and where the answers of its chain stand there."""
        ids: list[int] = []
        answers = {}
        for number in self.chain(turn):
            ids += self.turns[number].given
            answers[number] = slice(len(ids), len(ids) + len(self.turns[number].sampled))
            ids += self.turns[number].sampled
        return ids, answers

    def leaves(self) -> list[int]:
        """The turns that no other goes on from."""
        parents = {turn.parent for turn in self.turns}
        return [number for number in range(len(self.turns)) if number not in parents]


# Which turns each row of an episode trains, in order.
Cut = list[list[int]]


def draw_episodes(seed: int, groups: int = 2, members: int = 3) -> list[Episode]:
    """Draws groups of episodes of two to five turns; a group has one task."""
    rng = np.random.default_rng(seed)
    episodes = []
    for group in range(groups):
        task = _draw_ids(rng, 6)
        for member in range(members):
            number = group * members + member
            episode = Episode(
                name=f"e{number}",
                group=f"g{group}",
                role=f"role {number % 2}",
                baseline=float(rng.normal()),
                infos={"acc": float(rng.integers(3)), "form": float(rng.normal())},
            )
            for turn in range(int(rng.integers(2, 6))):
                episode.turns.append(_draw_turn(rng, turn, task))
            episodes.append(episode)
    return episodes


def _draw_turn(rng: np.random.Generator, number: int, task: list[int]) -> Turn:
    """Goes on behind the last turn, forks behind an earlier one, or begins a conversation."""
    parent = number - 1
    kind = rng.random()
    if number > 1 and kind < 0.3:
        parent = int(rng.integers(number - 1))
    elif kind < 0.5:
        parent = NOBODY
    given = _draw_ids(rng, int(rng.integers(1, 4)))
    if parent == NOBODY:
        # A helper's words, or a summary, stand behind the task.
        given = [*task, *(given if number else [])]
    length = int(rng.integers(2, 5))
    return Turn(
        parent=parent,
        given=given,
        sampled=_draw_ids(rng, length),
        reward=float(rng.normal()),
        state=f"state {rng.integers(3)}",
        engine_noise=[float(noise) for noise in 0.3 * rng.normal(size=length)],
    )


def _draw_ids(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(1, VOCABULARY, size=length)]


def in_one_row(episode: Episode) -> Episode:
    """The same turns as one conversation, which one row holds."""
    turns = []
    for number, turn in enumerate(episode.turns):
        given = turn.given if number == 0 else turn.given[-2:]
        turns.append(replace(turn, parent=number - 1, given=given))
    return replace(episode, turns=turns)


def fewest_rows(episode: Episode) -> Cut:
    """Cuts only where a path ends: each turn is trained in the first row that reaches it."""
    trained: set[int] = set()
    cut = []
    for leaf in episode.leaves():
        row = [turn for turn in episode.chain(leaf) if turn not in trained]
        trained.update(row)
        cut.append(row)
    return sorted(cut)


def row_a_turn(episode: Episode) -> Cut:
    """Gives each turn a row of its own."""
    return [[turn] for turn in range(len(episode.turns))]


def random_rows(episode: Episode, rng: np.random.Generator) -> Cut:
    """Trains each turn in any row that its path goes on from, or in a new one."""
    cut: Cut = []
    for turn in range(len(episode.turns)):
        chain = episode.chain(turn)
        open_rows = [row for row in cut if row[-1] in chain]
        if open_rows and rng.random() < 0.6:
            open_rows[int(rng.integers(len(open_rows)))].append(turn)
        else:
            cut.append([turn])
    return cut


def batch_of(
    episodes: list[Episode], cuts: list[Cut], engine: dict[tuple[str, int], Tensor], seed: int = 0
) -> DataProto:
    """Lays cut episodes out as rows of a batch, in any order.

    Args:
        engine: the engine's log-probs by episode and turn.
    """
    rng = np.random.default_rng(seed)
    rows = [
        (episode, number, turns)
        for episode, cut in zip(episodes, cuts, strict=True)
        for number, turns in enumerate(cut)
    ]
    order = rng.permutation(len(rows))
    rows = [rows[place] for place in order]
    size = len(rows)
    tensors = {
        "prompts": torch.zeros(size, PROMPT_WIDTH, dtype=torch.int32),
        "responses": torch.zeros(size, RESPONSE_WIDTH, dtype=torch.int32),
        "attention_mask": torch.zeros(size, PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.int8),
        "response_mask": torch.zeros(size, RESPONSE_WIDTH, dtype=torch.int8),
        "turn_ids": torch.full((size, RESPONSE_WIDTH), -1, dtype=torch.int16),
        "rollout_log_probs": torch.zeros(size, RESPONSE_WIDTH),
        "environment_rewards": torch.zeros(size, RESPONSE_WIDTH),
        "reward_baselines": torch.tensor([episode.baseline for episode, _, _ in rows]),
    }
    for row, (episode, _, turns) in enumerate(rows):
        ids, answers = episode.path(turns[-1])
        # The prompt ends anywhere before the first answer that is trained here.
        boundary = int(rng.integers(1, answers[turns[0]].start + 1))
        prompt = torch.tensor(ids[:boundary])
        response = torch.tensor(ids[boundary:])
        tensors["prompts"][row, PROMPT_WIDTH - boundary :] = prompt
        tensors["responses"][row, : len(response)] = response
        filled = slice(PROMPT_WIDTH - boundary, PROMPT_WIDTH + len(response))
        tensors["attention_mask"][row, filled] = 1
        for turn in turns:
            place = slice(answers[turn].start - boundary, answers[turn].stop - boundary)
            tensors["response_mask"][row, place] = 1
            tensors["turn_ids"][row, place] = turn
            tensors["rollout_log_probs"][row, place] = engine[episode.name, turn].float()
            tensors["environment_rewards"][row, place.stop - 1] = episode.turns[turn].reward
    columns = {
        "uid": object_array([episode.group for episode, _, _ in rows]),
        "episode_id": object_array([episode.name for episode, _, _ in rows]),
        "episode_row": np.array([number for _, number, _ in rows]),
        "role": object_array([episode.role for episode, _, _ in rows]),
        "anchors": object_array([[turn.state for turn in e.turns] for e, _, _ in rows]),
    }
    info = {"temperature": 1.0, "seed": 0, "global_steps": 1}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=info)


def infos_of(batch: DataProto, episodes: list[Episode]) -> dict[str, list[float | None]]:
    """What a reward function says beside the score: of an episode's last turn, in its row."""
    by_name = {episode.name: episode for episode in episodes}
    said: dict[str, list[float | None]] = {"acc": [], "form": []}
    names = batch.non_tensor_batch["episode_id"]
    last_turns = batch.batch["turn_ids"].amax(dim=1).tolist()
    for name, last_turn in zip(names, last_turns, strict=True):
        episode = by_name.get(name)
        answers_last = episode is not None and last_turn == len(episode.turns) - 1
        for kind, values in said.items():
            values.append(episode.infos[kind] if episode and answers_last else None)
    return said
