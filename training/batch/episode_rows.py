"""Arranges a batch by episodes: which rows belong to one, in which order, and whose values count.

Estimators, filters and metrics see episodes, and ask here. An episode counts once however many rows
it has, and its rewards reach back over all of them. What is said of its answer (a score, `acc`,
`pred`) is read from the row in which it answered last. Dummy rows, which only pad a batch to the
ranks, are an episode each and enter no average.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.array_ops import object_array, row_sums
from data.outcome_rewards import move_to_sampled_tokens
from data.protocol import DUMMY_UID, DataProto
from training.batch.row_groups import rows_by_key
from training.core_algos.masked_ops import sampled_sums

# Columns of the reward function's values beside the score begin with this.
REWARD_INFO = "reward_info/"


def real_rows(batch: DataProto) -> Tensor:
    """Returns (B,) bool: False for dummy rows."""
    uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)))
    return torch.from_numpy(uids.astype(object) != DUMMY_UID)


def episode_facts(batch: DataProto) -> list[Mapping[str, Any]]:
    """Lists the facts of a batch's episodes; none where it has prompts and their answers.

    Rows that pad the batch have those of the rows that they are copies of, which count once.
    """
    facts = batch.non_tensor_batch.get("episode_facts", ())
    real = real_rows(batch).tolist()
    return [
        of_row
        for of_row, is_real in zip(facts, real, strict=False)
        if is_real and of_row is not None
    ]


def observation_mask(batch: DataProto) -> Tensor:
    """Marks what environments wrote into responses: (B, R) int8.

    It is 0 on sampled tokens, on padding and in dummy rows; also in a row without a sampled token,
    which belongs to an episode that is left out and whose turns are not known there.
    """
    width = batch.batch["responses"].shape[1]
    attended = batch.batch["attention_mask"][:, -width:].bool()
    sampled = batch.batch["turn_ids"] >= 0
    kept_rows = real_rows(batch) & sampled.any(dim=1)
    return (attended & ~sampled & kept_rows[:, None]).to(torch.int8)


def group_keys(batch: DataProto) -> np.ndarray:
    """Names the group of each row, (B,) objects: of the same prompt, and in the same role."""
    columns = batch.non_tensor_batch
    uids = columns["uid"]
    if "agent_role" not in columns:
        return uids
    keys = []
    for uid, role in zip(uids, columns["agent_role"], strict=True):
        keys.append(uid if uid == DUMMY_UID else f"{uid} {role}")
    return object_array(keys)


def uid_of(group_key: str) -> str:
    """Returns the uid in one of `group_keys`."""
    return group_key.partition(" ")[0]


def scores_on_trained_tokens(batch: DataProto, scores: Tensor) -> Tensor:
    """Moves scores (B, R) from tokens that have been left out to those before them, else behind.

    Sums of rows stay the same. A row of which nothing is left gives its scores to the other rows of
    its episode, in the order of turns: an episode keeps its score as long as it has a token, and
    one that has none is worth nothing.
    """
    mask = batch.batch["response_mask"].bool()
    moved = move_to_sampled_tokens(scores, mask)
    is_lost = scores.any(dim=1) & ~mask.any(dim=1)  # (B,)
    episodes = EpisodeRows(batch)
    if episodes.one_row_each or not is_lost.any():
        return moved
    rows = [row for rows in episodes.rows if is_lost[rows].any() for row in rows]
    losing = batch.select_idxs(rows)
    # The lines hold what is left out too, so that scores find their neighbours.
    losing.batch["response_mask"] = mask[rows] | (scores[rows] != 0)
    whole = EpisodeRows(losing)
    lines = move_to_sampled_tokens(whole.join(scores[rows]), whole.join(mask[rows]))
    moved[rows] = whole.split(lines)
    return moved


class EpisodeRows:
    """Groups a batch's rows (B) by `episode_id` into E episodes, in the order of their first rows.

    Where several agents speak in an episode, each of their conversations counts as an episode of
    its own here: it has a reward of its own. With `by_conversation` false they are one episode, as
    for a validation, whose samples are episodes whoever speaks in them.

    Where an episode has several rows, its line holds the sampled tokens of all of them, one behind
    the other, so that it is as long as its tokens are and not as its rows. With e for what was not
    sampled:

            rows       e0: [a a . .]   e1: [b b b .]   e0: [c c e c]
        episodes   e0: [a a c c c]   e1: [b b b . .]

    They stand in the order of their turns: where a program's conversation goes on after those of
    its helpers, so does its line.

    Attributes:
        rows: for each episode its row numbers, in the order in which they begin (`episode_row`).
        first: (E,) int64, each episode's first row.
        real: (B,) bool, False for dummy rows.
        one_row_each: whether the episodes are the batch's rows.
    """

    def __init__(self, batch: DataProto, *, by_conversation: bool = True) -> None:
        columns = batch.non_tensor_batch
        size = len(batch)
        self._batch = batch
        self.real = real_rows(batch)
        ids = columns.get("episode_id", np.arange(size))
        order = columns.get("episode_row", np.zeros(size, dtype=np.int64))
        conversations = np.full(size, "")
        if by_conversation:
            conversations = columns.get("agent_conversation", conversations)
        # The number of a dummy row is its key, as no id is an integer.
        keys = [
            (str(episode_id), str(conversation)) if is_real else row
            for row, (episode_id, conversation, is_real) in enumerate(
                zip(ids, conversations, self.real.tolist(), strict=True)
            )
        ]
        rows_of_episode = rows_by_key(keys).values()
        self.rows = sorted(sorted(rows, key=order.__getitem__) for rows in rows_of_episode)
        self.first = np.array([rows[0] for rows in self.rows], dtype=np.int64)
        self.one_row_each = all(rows == [i] for i, rows in enumerate(self.rows))
        lengths = [len(rows) for rows in self.rows]
        in_order = np.array([row for rows in self.rows for row in rows], dtype=np.int64)
        self._episode_of_row = torch.empty(size, dtype=torch.int64)
        self._episode_of_row[in_order] = torch.from_numpy(
            np.repeat(np.arange(len(lengths)), lengths)
        )

    @cached_property
    def last(self) -> np.ndarray:
        """Finds the row of each episode that holds its last turn, (E,) int64: its values count.

        That is not the row that began last where a conversation goes on after those of its helpers.
        Rows that an environment asked for (`row_aside`) are none of its answers.
        Turns that a correction has left out are turns all the same.
        """
        if self.one_row_each or "turn_ids" not in self._batch.batch:
            return np.array([rows[-1] for rows in self.rows], dtype=np.int64)
        last_turns = self._batch.batch["turn_ids"].amax(dim=1).tolist()  # (B,)
        aside = self._batch.non_tensor_batch.get("row_aside", np.zeros(len(last_turns), bool))
        places = list(zip((~aside).tolist(), last_turns, strict=True))
        found = []
        for rows in self.rows:
            # From the end, as the later one counts of rows without a sampled token.
            found.append(max(reversed(rows), key=places.__getitem__))
        return np.array(found, dtype=np.int64)

    def column(self, name: str) -> np.ndarray:
        """Returns each episode's value of a column, (E,).

        What the reward function said counts of the row that holds the last turn; all else is the
        first row's.

        Raises:
            KeyError: the batch has no such column.
        """
        rows = self.last if name.startswith(REWARD_INFO) else self.first
        return self._batch.non_tensor_batch[name][rows]

    @cached_property
    def first_by_group(self) -> dict[str, list[int]]:
        """Lists the first rows of each group's episodes by its uid, dummies left out.

        Raises:
            KeyError: the batch has no uids.
        """
        return self._first_by(self._batch.non_tensor_batch["uid"])

    @cached_property
    def first_by_role(self) -> dict[str, list[int]]:
        """Does as `first_by_group`, by `group_keys`: those that are compared with each other."""
        return self._first_by(group_keys(self._batch))

    def _first_by(self, names: np.ndarray) -> dict[str, list[int]]:
        first = self.first[self.real.numpy()[self.first]]
        rows = first.tolist()
        groups = rows_by_key(map(str, names[first]))
        return {name: [rows[member] for member in members] for name, members in groups.items()}

    def can_join(self, tensor: Tensor, width: int) -> bool:
        """Checks whether `join` takes the tensor.

        It takes (B,) and (B, width), and any shape where each episode has one row.
        """
        return self.one_row_each or tensor.shape[1:] in ((), (width,))

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each sampled token's row, column, and place in the flat lines; in their order."""
        order: list[int] = []
        for rows in self.rows:
            order.extend(rows)
        rows_in_order = torch.tensor(order)
        mask = self._batch.batch["response_mask"][rows_in_order].bool()
        positions, columns = mask.nonzero(as_tuple=True)
        token_rows = rows_in_order[positions]
        lines = self._episode_of_row[token_rows]
        turn_ids = self._batch.batch.get("turn_ids")
        if turn_ids is not None:
            turns = turn_ids[token_rows, columns].long().clamp(min=0)
            in_time = (lines * (int(turn_ids.max()) + 1) + turns).argsort(stable=True)
            token_rows, columns, lines = token_rows[in_time], columns[in_time], lines[in_time]
        first_token_of_line = self.lengths.cumsum(0) - self.lengths
        place_in_line = torch.arange(len(token_rows)) - first_token_of_line[lines]
        return token_rows, columns, lines * self._width + place_in_line

    @cached_property
    def _width(self) -> int:
        """Counts the sampled tokens of the longest episode, one at least."""
        return max(int(self.lengths.max()), 1)

    @cached_property
    def lengths(self) -> Tensor:
        """Counts each episode's sampled tokens: (E,) int64."""
        tokens = row_sums(self._batch.batch["response_mask"]).long()
        return tokens.new_zeros(len(self.rows)).index_add(0, self._episode_of_row, tokens)

    def join(self, tensor: Tensor) -> Tensor:
        """Makes lines of sampled tokens: (B, R) -> (E, tokens of the longest).

        Of a column it takes each episode's first row: (B,) -> (E,).
        """
        if self.one_row_each:
            return tensor
        if tensor.dim() == 1:
            return tensor[torch.from_numpy(self.first)]
        rows, columns, places = self._places
        joined = tensor.new_zeros(len(self.rows), self._width)
        joined.view(-1)[places] = tensor[rows, columns]
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Undoes `join` for lines: (B, R), zero where nothing was sampled."""
        if self.one_row_each:
            return joined
        rows, columns, places = self._places
        tokens = joined.new_zeros(self._batch.batch["response_mask"].shape)
        tokens[rows, columns] = joined.reshape(-1)[places]
        return tokens

    def totals(self, tensor: Tensor) -> Tensor:
        """Sums each episode's sampled tokens, without lines: (B, R) -> (E,) float64."""
        sums = sampled_sums(tensor, self._batch.batch["response_mask"])
        return sums.new_zeros(len(self.rows)).index_add(0, self._episode_of_row, sums)

    def as_scores(self) -> DataProto:
        """Makes a batch of one row an episode, with a single column of tokens.

        It holds the sum of the episode's rewards, and as mask its number of tokens.
        """
        columns = {name: self.column(name) for name in self._batch.non_tensor_batch}
        tensors = {
            "token_level_rewards": self.totals(self._batch.batch["token_level_rewards"])[:, None],
            "response_mask": self.lengths[:, None],
        }
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def parts_of_similar_length(self, keys: Sequence[Any]) -> list[list[int]]:
        """Cuts the rows (B) into parts whose lines are about as long.

        So the memory that a part takes follows its tokens. Episodes of one key (E keys) stay
        together. Among the longest episodes of the keys in a part none is twice as long as another.
        Keys whose episodes have one row each are in parts of their own, where rows stay as they
        are: what an estimator makes of them does not depend on the other keys.
        """
        longest: dict[Any, int] = {}
        split_keys = set()
        for key, rows, length in zip(keys, self.rows, self.lengths.tolist(), strict=True):
            longest[key] = max(longest.get(key, 0), length)
            if len(rows) > 1:
                split_keys.add(key)
        kinds = []
        for episode in self._episode_of_row.tolist():
            key = keys[episode]
            kinds.append((key in split_keys, longest[key].bit_length()))
        return list(rows_by_key(kinds).values())

    def of_rows(self, per_episode: Tensor) -> Tensor:
        """Gives every row its episode's number: (E,) -> (B,)."""
        return per_episode[self._episode_of_row]

    def shares(self) -> Tensor | None:
        """Computes each row's share of its episode's sampled tokens, (B,) float32.

        Returns None where every row is its whole episode.
        """
        if self.one_row_each:
            return None
        tokens = row_sums(self._batch.batch["response_mask"]).float()
        return tokens / self.of_rows(self.lengths).clamp(min=1)

    def fold(self, per_row: Tensor, how: Literal["sum", "amax", "amin"] = "sum") -> Tensor:
        """Reduces (B,) over each episode's rows, dummies left out: (real episodes,) float64."""
        values = per_row[self.real].double()
        episodes, numbers = self._episode_of_row[self.real].unique(return_inverse=True)
        folded = values.new_zeros(len(episodes))
        return folded.scatter_reduce(0, numbers, values, how, include_self=False)
