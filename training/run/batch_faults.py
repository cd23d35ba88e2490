"""What is wrong with a batch, as far as the batch itself can tell: what cannot be, whatever the policy does.

Each finding is the name of an alarm (see `alarms.ADVICE`) and what was seen, with the episode and the token.
Invariant: nothing is changed; a batch of a user's own that lacks a column is not judged by it.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from data.containers import row_blocks
from data.protocol import DataProto
from data.texts import say
from training.batch.batching import rows_by_key
from training.batch.episode_rows import EpisodeRows

Finding = tuple[str, str]
# Nats by which it must be unlikely that samples agree by chance: one in 10^10.
UNLIKELY = 23.0
# Of pairs of episodes those that advantages may order otherwise than rewards do: where they are compared within groups
# nearly none, else more, as a late reward counts for more tokens; 0.5 is chance.
MOST_WRONG, MOST_WRONG_OF_OWN = {True: 0.05, False: 0.4}, 0.7
MOST_COMPARED = 256
FEWEST_EPISODES = 8


def finding(alarm: str, /, **facts: Any) -> Finding:
    """Makes the finding of an alarm whose text is in data/texts.yaml."""
    return alarm, say(alarm, **facts)


def place(batch: DataProto, row: int, token: int) -> str:
    """Names a token of a row."""
    ids = batch.non_tensor_batch.get("episode_id", batch.non_tensor_batch.get("uid"))
    return f"token {token} of the response of " + (f"row {row}" if ids is None else f"episode {ids[row]}")


def first_place(batch: DataProto, wrong: Tensor) -> str:
    """Names the first token where `wrong`, (B, R) bool."""
    return place(batch, *wrong.nonzero()[0].tolist())


def turn_goes_on(turns: Tensor) -> Tensor:
    """Says of which tokens the next one belongs to the same turn: (B, R) bool of turn_ids."""
    return nnf.pad(turns[:, :-1] == turns[:, 1:], (0, 1))


def not_finite(batch: DataProto) -> Iterator[Finding]:
    """Finds numbers that are none."""
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "token_level_scores", "advantages"):
        tensor = batch.batch.get(name, torch.zeros(0, 1))
        if bad := [rows for rows in row_blocks(tensor) if not tensor[rows].isfinite().all()]:
            row, token = (~tensor[bad[0]].isfinite()).nonzero()[0].tolist()
            yield "not_finite", f"{name} has NaN or infinity, first at {place(batch, bad[0].start + row, token)}"


def wrong_tokens(batch: DataProto, eos_token_id: int | None) -> Iterator[Finding]:
    """Finds tokens that are trained on and were not sampled, and turns that went on behind their end."""
    tensors, turns = batch.batch, batch.batch.get("turn_ids")
    mask = tensors["response_mask"].bool()  # (B, R)
    unsampled = mask & ~tensors["attention_mask"][:, -mask.shape[1] :].bool()
    if turns is not None:
        unsampled |= mask & (turns < 0)
    if count := int(unsampled.sum()):
        yield finding("unsampled_tokens", count=count, of=int(mask.sum()), first=first_place(batch, unsampled))
    if turns is not None and (left := (turns >= 0) & ~mask & mask.any(1, keepdim=True)).any():
        yield finding("tokens_left_out", left=int(left.sum()), first=first_place(batch, left))
    if turns is not None and eos_token_id is not None:
        within = mask & (tensors["responses"] == eos_token_id) & turn_goes_on(turns)
        if count := int(within.sum()):
            yield finding("end_ignored", turns=count, first=first_place(batch, within))


def misplaced_rewards(batch: DataProto) -> Iterator[Finding]:
    """Finds rewards on tokens that were not sampled, or that do not end what they pay for.

    An environment's reward stands on the last token of its turn, a score of a whole answer on the answer's last. Scores
    of single tokens may stand anywhere among the sampled ones.
    """
    tensors = batch.batch
    mask, scores = tensors["response_mask"].bool(), tensors["token_level_scores"]  # (B, R)
    given = scores != 0
    if (off := given & ~mask & mask.any(1, keepdim=True)).any():
        yield "reward_misplaced", f"a reward stands on a token that was not sampled: {first_place(batch, off)}"
        return
    rows = given.any(1)
    if "environment_rewards" in tensors and torch.equal(scores, tensors["environment_rewards"]):
        if (off := given & turn_goes_on(tensors["turn_ids"])).any():
            yield "reward_misplaced", f"an environment's reward stands within a turn: {first_place(batch, off)}"
    elif rows.sum() > 1 and (given.sum(1)[rows] == 1).all():
        last = (mask * torch.arange(mask.shape[1])).amax(1, keepdim=True)
        if not given.gather(1, last)[rows].any():
            yield "reward_misplaced", f"no reward stands on the last sampled token, but on {first_place(batch, given)}"


def other_rewards(batch: DataProto, episodes: EpisodeRows, paid_by_environment: bool) -> Iterator[Finding]:
    """Finds episodes whose rows hold other rewards than the environment gave."""
    paid = batch.batch.get("environment_rewards")
    live = batch.batch["response_mask"].any(1, keepdim=True)  # dummies keep what they are copies of
    if paid_by_environment and paid is not None and (wrong := live & (batch.batch["token_level_scores"] != paid)).any():
        yield "reward_differs", f"a score is not what the environment gave: {first_place(batch, wrong)}"
    facts, ids = batch.non_tensor_batch.get("episode_facts"), batch.non_tensor_batch.get("episode_id")
    if facts is None or ids is None or "environment_rewards" not in batch.batch:
        return
    sums = batch.batch["environment_rewards"].sum(1).tolist()
    for rows in (rows for rows in episodes.rows if episodes.real[rows[0]]):
        fact = facts[rows[0]]
        held = sum(sums[row] for row in rows)
        if fact is not None and not math.isclose(held, fact["reward"], rel_tol=1e-3, abs_tol=1e-4):
            yield finding("reward_differs", name=ids[rows[0]], gave=fact["reward"], held=held)
            return


def wrong_groups(batch: DataProto, episodes: EpisodeRows, group_size: int, same_tasks: bool) -> Iterator[Finding]:
    """Finds groups of another size than asked for, and groups that mix prompts."""
    groups = grouped(batch, episodes)
    if (uid := next((uid for uid, rows in groups.items() if len(rows) != group_size), None)) is not None:
        yield "group_size", f"group {uid} has {len(groups[uid])} episodes, not {group_size}"
    prompts, tasks = batch.batch["prompts"].numpy(), batch.non_tensor_batch.get("group_index")
    columns = [*([prompts] if same_tasks else []), *([] if tasks is None else [tasks])]
    if mixed := [uid for uid, rows in groups.items() if any((own[rows] != own[rows[0]]).any() for own in columns)]:
        yield "groups_mixed", f"{len(mixed)} of {len(groups)} groups have episodes of different prompts, as {mixed[0]}"


def grouped(batch: DataProto, episodes: EpisodeRows) -> dict[str, list[int]]:
    """Lists the first rows of each group's episodes by its uid, dummies left out."""
    first = episodes.first[episodes.real.numpy()[episodes.first]]
    groups = rows_by_key(map(str, batch.non_tensor_batch["uid"][first]))
    return {uid: first[members].tolist() for uid, members in groups.items()}


def other_advantages(batch: DataProto, episodes: EpisodeRows, by_group: bool, own: bool) -> Iterator[Finding]:
    """Finds advantages that do not follow the rewards they were made of: of two episodes the better has less."""
    tensors = batch.batch
    tokens = episodes.fold(tensors["response_mask"].sum(1)).numpy()
    rewards = episodes.fold(tensors["token_level_rewards"].sum(1)).numpy()
    sums = episodes.fold((tensors["advantages"] * tensors["response_mask"]).sum(1)).numpy()
    advantages = sums / np.maximum(tokens, 1)
    number = {row: i for i, row in enumerate(episodes.first[episodes.real.numpy()[episodes.first]].tolist())}
    groups = [[number[row] for row in rows] for rows in grouped(batch, episodes).values()]
    pairs = wrong = 0
    for members in groups if by_group else [[*number.values()][:MOST_COMPARED]]:
        live = np.array([i for i in members if tokens[i] > 0], dtype=np.int64)
        better = rewards[live][:, None] > rewards[live] + 1e-6
        pairs += int(better.sum())
        wrong += int((better & (advantages[live][:, None] < advantages[live] - 1e-6)).sum())
    if pairs >= FEWEST_EPISODES and wrong > (MOST_WRONG_OF_OWN if own else MOST_WRONG[by_group]) * pairs:
        yield finding("advantages_wrong", wrong=wrong, pairs=pairs, whose="a group" if by_group else "the batch")


def uneven_advantages(batch: DataProto, episodes: EpisodeRows, cancel: bool) -> Iterator[Finding]:
    """Finds advantages that vary within an answer, or where they should `cancel` out in their group and do not."""
    mask, advantages = batch.batch["response_mask"].bool(), batch.batch["advantages"]
    highest = advantages.masked_fill(~mask, -math.inf).amax(1)
    spread = highest - advantages.masked_fill(~mask, math.inf).amin(1)
    if (uneven := spread > 1e-4 * highest.abs().clamp(min=1)).any():
        first = first_place(batch, uneven[:, None] & mask)
        yield "advantages_wrong", f"they vary within {int(uneven.sum())} answers, first in that of {first}"
    live = mask.any(1)
    for uid, rows in grouped(batch, episodes).items() if cancel else ():
        if live[rows].all() and abs(mean := highest[rows].mean().item()) > 1e-3 * max(1.0, highest[rows].abs().max()):
            yield "advantages_wrong", f"those of group {uid} have the mean {mean:.2g}, not 0"
            return


def equal_answers(batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
    """Finds groups whose members say the same more often than independent draws would.

    Of the first turns, all of which answer one prompt, the others equal a group's first with its own probability: the
    number that do is compared with the sum of these, by Chernoff's bound for a Poisson number.
    """
    tensors = batch.batch
    log_probs = tensors.get("rollout_log_probs", tensors.get("old_log_probs"))
    if log_probs is None:
        return
    said = tensors["response_mask"].numpy().astype(bool)
    said = said & (tensors["turn_ids"].numpy() == 0) if "turn_ids" in tensors else said
    ids, chances = tensors["responses"].numpy(), np.where(said, log_probs.float().numpy(), 0).sum(1, dtype=np.float64)
    equal, expected, worst = 0, 0.0, ""
    for uid, rows in grouped(batch, episodes).items():
        first, *others = (ids[row][said[row]].tobytes() for row in rows)
        same = sum(answer == first for answer in others) if first else 0
        expected += math.exp(min(chances[rows[0]], 0.0)) * len(others) if first else 0.0
        equal, worst = equal + same, worst or (uid if same else "")
    if equal > expected and equal * math.log(equal / max(expected, 1e-300)) - equal + expected > UNLIKELY:
        yield finding("equal_answers", equal=equal, expected=expected, worst=worst)
