"""Batches of episodes, as `RayPPOTrainer.rollout` returns them: by episode and turn, not by row.

A row's tokens, with P the prompt, A what the policy sampled and E what the environment replied:

    prompts = P    responses = A0 E0 A1 E1    turn_ids = 0 -1 1 -1    response_mask = 1 0 1 0
    turns   = (observation P, tokens A0 E0, mask 1 0), (observation E0, tokens A1 E1, mask 1 0)

Invariant: everything is read off the batch that is trained on; nothing is tokenised again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Self

from tensordict import TensorDict

from custom.env import Trajectory
from custom.reward_manager import decode_prompt
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows


class RolloutTurn(NamedTuple):
    """Holds a turn: what the policy saw and wrote, with the ids of that and of the reply to it.

    `log_probs` are in nats and `mask` is 1 on the ids that the policy sampled; both are 0 on the
    reply's. `reward` is what the turn was paid.
    """

    observation: str
    text: str
    tokens: list[int]
    log_probs: list[float]
    mask: list[int]
    reward: float


@dataclass
class RolloutData:
    """Holds a batch of episodes, as `RayPPOTrainer.rollout` plays them, and `train_step` reads it.

    `texts`, `tokens`, `log_probs`, `masks` and `rewards` are lists by episode and, inside, by turn
    (see RolloutTurn).

    Attributes:
        batch: what is trained on.
        episodes: the turns of each episode.
        endings: how each episode ended.
        facts: what the metrics of episodes are made of.
    """

    batch: DataProto
    episodes: list[list[RolloutTurn]]
    endings: list[str]
    facts: list[dict[str, Any]]

    @classmethod
    def of(cls, batch: DataProto, tokenizer: Any, facts: Sequence[dict[str, Any]] = ()) -> Self:
        """Reads the episodes off a batch that is scored."""
        endings_of_rows = batch.non_tensor_batch["ending"]
        episodes: list[list[RolloutTurn]] = []
        endings: list[str] = []
        for rows in EpisodeRows(batch).rows:
            episodes.append(turns_in_order(batch, rows, tokenizer))
            endings.append(str(endings_of_rows[rows[0]]))
        return cls(batch, episodes, endings, list(facts))

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def texts(self) -> list[list[str]]:
        """Returns what the policy wrote."""
        return self._by_turn("text")

    @property
    def tokens(self) -> list[list[list[int]]]:
        """Returns the token ids of each turn and the reply to it."""
        return self._by_turn("tokens")

    @property
    def log_probs(self) -> list[list[list[float]]]:
        """Returns the log-probs of the tokens, in nats."""
        return self._by_turn("log_probs")

    @property
    def masks(self) -> list[list[list[int]]]:
        """Returns 1 for each token that the policy sampled, 0 for the others."""
        return self._by_turn("mask")

    @property
    def rewards(self) -> list[list[float]]:
        """Returns what each turn was paid."""
        return self._by_turn("reward")

    def _by_turn(self, name: str) -> list[list[Any]]:
        """Returns a field of every turn, by episode."""
        read = attrgetter(name)
        return [list(map(read, turns)) for turns in self.episodes]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Returns the episodes as trajectories, whose states are what the model read.

        Their infos are empty.
        """
        pairs = zip(self.episodes, self.endings, strict=True)
        return [trajectory_of(turns, ending) for turns, ending in pairs]


def trajectory_of(turns: Sequence[RolloutTurn], ending: str) -> Trajectory:
    """Makes the trajectory of an episode; its last state is empty."""
    states: list[Any] = [turn.observation for turn in turns]
    dones = [False] * len(turns)
    if turns:
        dones[-1] = ending == "done"
    return Trajectory(
        states=[*states, ""],
        actions=[turn.text for turn in turns],
        rewards=[turn.reward for turn in turns],
        dones=dones,
        infos=[{} for _ in turns],
        ending=ending,
    )


def turns_in_order(batch: DataProto, rows: Sequence[int], tokenizer: Any) -> list[RolloutTurn]:
    """Lists the turns of an episode's rows by their numbers.

    A conversation may go on in one row after its helpers have spoken in others.
    """
    numbered: list[tuple[int, RolloutTurn]] = []
    for row in rows:
        numbered.extend(numbered_turns(batch, row, tokenizer))
    numbered.sort(key=itemgetter(0))
    return [turn for _, turn in numbered]


def numbered_turns(batch: DataProto, row: int, tokenizer: Any) -> Iterator[tuple[int, RolloutTurn]]:
    """Yields the turns of a row, each with its number in the episode."""
    tensors = batch.batch[row]
    ids = tensors["responses"]  # (response_len,), as the mask and the log-probs
    mask = tensors["response_mask"]
    log_probs = tensors.get("rollout_log_probs", mask * float("nan"))
    observation = decode_prompt(tokenizer, batch.batch, row)
    numbers = [number for number in tensors["turn_ids"].unique().tolist() if number >= 0]
    for number, (start, stop) in zip(numbers, pairwise(_turn_bounds(tensors)), strict=True):
        turn = slice(start, stop)
        sampled = mask[turn] > 0
        yield (
            number,
            RolloutTurn(
                observation=observation,
                text=tokenizer.decode(ids[turn][sampled], skip_special_tokens=True),
                tokens=ids[turn].tolist(),
                log_probs=log_probs[turn].tolist(),
                mask=mask[turn].tolist(),
                reward=float(tensors["token_level_scores"][turn].sum()),
            ),
        )
        observation = tokenizer.decode(ids[turn][~sampled], skip_special_tokens=True)


def _turn_bounds(tensors: TensorDict) -> list[int]:
    """Lists the places in a row's response where its turns begin, and the one where it ends."""
    turn_ids = tensors["turn_ids"]  # (response_len,), -1 where nothing was sampled
    bounds: list[int] = []
    for number in turn_ids.unique().tolist():
        if number >= 0:
            bounds.append(int((turn_ids == number).nonzero()[0]))
    response_length = int(tensors["attention_mask"][-len(turn_ids) :].sum())
    return [*bounds, response_length]
