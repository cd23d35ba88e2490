"""Recomputes advantages from the batch's own rewards and values, by formulas that stand here alone.

What an estimator gives is compared with what its paper says: by group where a group's scores decide
(grpo, rloo), along the tokens of one group where each token has its own (gae, reinforce_plus_plus).
Of other estimators that compare the members of a group only the order is known: the better episode
has no smaller advantage.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, uid_of
from training.batch.masked_ops import sampled_sums
from training.config import AlgorithmConfig
from training.core_algos.built_in import BUILT_IN_ESTIMATORS, estimator_needs
from training.run.alarms.catalogue import Finding, Place

EPSILON = 1e-6
# A difference that no rounding makes, of 1 + the number's size.
TOLERANCE = 1e-3
# Pairs of episodes that are ordered otherwise than by their rewards: hardly any, or, by an
# estimator of a user's own, not nearly all.
MOST_WRONG = 0.05
MOST_WRONG_OF_OWN = 0.9
FEWEST_PAIRS = 8
# Estimators that give an episode one number, which a better score never makes smaller.
ORDERED = ("opo", "gpg", "reinforce_plus_plus_baseline")
EXACT = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
BY_TOKEN = ("gae", "reinforce_plus_plus")


def wrong_advantages(
    batch: DataProto, episodes: EpisodeRows, algorithm: AlgorithmConfig, step: int
) -> Iterator[Finding]:
    """Finds advantages that are not what rewards and values make them.

    Args:
        step: chooses the group whose tokens are gone through.
    """
    name = algorithm.adv_estimator
    groups = list(episodes.first_by_role.items())
    if not groups:
        return
    if name in BY_TOKEN:
        uid, first_rows = groups[step % len(groups)]
        rows_of = {rows[0]: rows for rows in episodes.rows}
        problem = _token_problem(batch, [rows_of[row] for row in first_rows], algorithm)
        if problem:
            yield Finding("advantages_wrong", f"in group {uid} {problem}", Place(group=uid_of(uid)))
        return
    is_own = name not in BUILT_IN_ESTIMATORS and "index" in estimator_needs(name)
    if name in EXACT or name in ORDERED or is_own:
        yield from _wrong_groups(batch, episodes, dict(groups), algorithm, is_own)


def group_advantages(name: str, scores: np.ndarray, by_std: bool) -> np.ndarray:
    """Computes a group's advantages from its members' scores, two at least: (members,)."""
    deviations = scores - scores.mean()
    if name.startswith("rloo"):
        return deviations * len(scores) / (len(scores) - 1)
    if by_std:
        return deviations / (scores.std(ddof=1) + EPSILON)
    return deviations


def _wrong_groups(
    batch: DataProto,
    episodes: EpisodeRows,
    groups: dict[str, list[int]],
    algorithm: AlgorithmConfig,
    is_own: bool,
) -> Iterator[Finding]:
    """Compares each episode's mean advantage with its group's scores."""
    name = algorithm.adv_estimator
    mask = batch.batch["response_mask"]
    tokens = _by_episode(batch, episodes, mask)
    scores = _by_episode(batch, episodes, batch.batch["token_level_rewards"])
    advantages = batch.batch["advantages"]
    means = _by_episode(batch, episodes, advantages) / np.maximum(tokens, 1)
    squares = _by_episode(batch, episodes, advantages.square()) / np.maximum(tokens, 1)
    number_of = {int(row): number for number, row in enumerate(episodes.first)}
    pairs = 0
    wrong = 0
    for uid, rows in groups.items():
        members = np.array([number_of[row] for row in rows])
        members = members[tokens[members] > 0]
        if len(members) < 2:
            continue
        found = means[members]
        if name in EXACT:
            by_std = algorithm.norm_adv_by_std_in_grpo
            right = group_advantages(name, scores[members], by_std)
            worst = int(np.abs(found - right).argmax())
            if abs(found[worst] - right[worst]) > TOLERANCE * (1 + abs(right[worst])):
                yield Finding(
                    "advantages_wrong",
                    f"an episode of group {uid} has the advantage {found[worst]:.3g}; of scores "
                    f"{_listed(scores[members])} {name} makes {right[worst]:.3g}",
                    Place(group=uid_of(uid)),
                )
                return
            spread = float((squares[members] - found**2).max())
            if spread > TOLERANCE * (1 + float((found**2).max())):
                yield Finding(
                    "advantages_wrong",
                    f"they vary within an episode of group {uid}, and {name} gives it one number",
                    Place(group=uid_of(uid)),
                )
                return
        is_better = scores[members][:, None] > scores[members] + EPSILON
        pairs += int(is_better.sum())
        wrong += int((is_better & (found[:, None] < found - EPSILON)).sum())
    allowed = MOST_WRONG_OF_OWN if is_own else MOST_WRONG
    if pairs >= FEWEST_PAIRS and wrong > allowed * pairs:
        yield Finding(
            "advantages_wrong",
            f"in {wrong} of {pairs} pairs within groups the better episode has the smaller "
            "advantage",
        )


def _by_episode(batch: DataProto, episodes: EpisodeRows, tensor: Tensor) -> np.ndarray:
    """Sums each episode's sampled tokens, dummies included: (B, R) -> (E,) float64."""
    sums = sampled_sums(tensor, batch.batch["response_mask"]).numpy()
    return np.array([sums[rows].sum() for rows in episodes.rows])


def _listed(scores: np.ndarray) -> str:
    return " ".join(f"{score:.3g}" for score in scores[:8])


def _token_problem(
    batch: DataProto, episodes: list[list[int]], algorithm: AlgorithmConfig
) -> str | None:
    """Recomputes some episodes' returns and advantages; says what is wrong, if anything is.

    Advantages are whitened over the whole batch, so that they are a line of the plain ones, which
    rises.
    """
    fields = batch.batch
    by_gae = algorithm.adv_estimator == "gae"
    lam = algorithm.lam if by_gae else 1.0
    plain_parts = []
    found_parts = []
    for rows in episodes:
        columns = {}
        for name in (
            "token_level_rewards",
            "advantages",
            "returns",
            *(["values"] if by_gae else []),
        ):
            lines = [fields[name][row][fields["response_mask"][row].bool()] for row in rows]
            columns[name] = np.concatenate([line.double().numpy() for line in lines])
        rewards = columns["token_level_rewards"]
        if not len(rewards):
            continue
        values = columns.get("values", np.zeros_like(rewards))
        plain = gae(rewards, values, algorithm.gamma, lam)
        right = plain + values
        worst = int(np.abs(columns["returns"] - right).argmax())
        if abs(columns["returns"][worst] - right[worst]) > TOLERANCE * (1 + abs(right[worst])):
            return (
                f"a return is {columns['returns'][worst]:.3g}; rewards and values make "
                f"{right[worst]:.3g} of it"
            )
        plain_parts.append(plain)
        found_parts.append(columns["advantages"])
    if not plain_parts:
        return None
    return _line_problem(np.concatenate(plain_parts), np.concatenate(found_parts))


def _line_problem(plain: np.ndarray, found: np.ndarray) -> str | None:
    """Says where whitened advantages are no rising line of the plain ones."""
    spread = plain - plain.mean()
    if np.abs(spread).max() < TOLERANCE:
        return None
    slope = float((spread * found).sum() / (spread**2).sum())
    if slope <= 0:
        return "advantages fall where rewards and values let them rise"
    distance = np.abs(found - found.mean() - slope * spread).max()
    if distance > TOLERANCE * (1 + np.abs(found).max()):
        return (
            f"advantages differ by up to {distance:.3g} from what rewards and values make of them"
        )
    return None


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Computes generalised advantages of one episode's tokens (arXiv:1506.02438, eq. 16)."""
    advantages = np.zeros_like(rewards)
    advantage = 0.0
    next_value = 0.0
    for token in range(len(rewards) - 1, -1, -1):
        surprise = rewards[token] + gamma * next_value - values[token]
        advantage = surprise + gamma * lam * advantage
        advantages[token] = advantage
        next_value = values[token]
    return advantages
