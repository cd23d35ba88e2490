"""Finds what cannot be in a batch, whatever the policy does: wrong masks, places, groups, copies.

A batch of a user's own that lacks a column is not judged by it.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from data.protocol import DataProto
from features.alarms.catalogue import Finding, Place
from training.batch.episode_rows import EpisodeRows

# Nats by which it must be unlikely that samples agree by chance: one in 10^10.
UNLIKELY = 23.0


def unsampled_tokens(batch: DataProto) -> Iterator[Finding]:
    """Finds tokens that are trained on and were not sampled."""
    fields = batch.batch
    mask = fields["response_mask"].bool()  # (B, R)
    attended = fields["attention_mask"][:, -mask.shape[1] :].bool()
    wrong = mask & ~attended
    turns = fields.get("turn_ids")
    if turns is not None:
        wrong |= mask & (turns < 0)
    count = int(wrong.sum())
    if count > 0:
        yield Finding(
            "unsampled_tokens",
            f"{count} of {int(mask.sum())} tokens that are trained on were not sampled by the "
            f"policy, first {_first_place(batch, wrong)}",
            first_place(batch, wrong),
        )


def tokens_left_out(batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
    """Finds sampled tokens that are not trained on, in episodes of which others are.

    Sampled are those that have a turn, or a log-prob of the engine's; and each episode's facts
    count them.
    """
    fields = batch.batch
    mask = fields["response_mask"].bool()  # (B, R)
    sampled = torch.zeros_like(mask)
    if "turn_ids" in fields:
        sampled |= fields["turn_ids"] >= 0
    if "rollout_log_probs" in fields:
        sampled |= fields["rollout_log_probs"] != 0
    left_out = sampled & ~mask & mask.any(1, keepdim=True)
    if left_out.any():
        yield Finding(
            "tokens_left_out",
            f"{int(left_out.sum())} of {int(sampled.sum())} sampled tokens are not trained on, "
            f"first {_first_place(batch, left_out)}",
            first_place(batch, left_out),
        )
        return
    lengths = mask.sum(1).tolist()
    for rows, facts in played_episodes(batch, episodes):
        trained = sum(lengths[row] for row in rows)
        if trained != facts["sampled_tokens"]:
            yield Finding(
                "tokens_left_out",
                f"{trained} tokens of episode {batch.non_tensor_batch['episode_id'][rows[0]]} are "
                f"trained on, {facts['sampled_tokens']} were sampled",
                place_of(batch, rows[0]),
            )
            return


def played_episodes(
    batch: DataProto, episodes: EpisodeRows
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yields the rows and the facts of the episodes in environments that are trained on."""
    facts = batch.non_tensor_batch.get("episode_facts")
    if facts is None:
        return
    is_live = batch.batch["response_mask"].any(1).tolist()
    is_real = episodes.real.tolist()
    for rows in episodes.rows:
        known = facts[rows[0]]
        if known and is_real[rows[0]] and any(is_live[row] for row in rows):
            yield rows, known


def ignored_ends(batch: DataProto, eos_token_id: int) -> Iterator[Finding]:
    """Finds turns that went on behind the token that ends them."""
    fields = batch.batch
    if "turn_ids" not in fields:
        return
    is_end = fields["response_mask"].bool() & (fields["responses"] == eos_token_id)
    goes_on = is_end & _turn_goes_on(fields["turn_ids"])
    if goes_on.any():
        yield Finding(
            "end_ignored",
            f"{int(goes_on.sum())} turns went on behind their end, first at "
            f"{_first_place(batch, goes_on)}",
            first_place(batch, goes_on),
        )


def misplaced_rewards(batch: DataProto) -> Iterator[Finding]:
    """Finds rewards on tokens that were not sampled, or that do not end what they pay for.

    An environment's reward stands on the last token of its turn, a score of a whole answer on the
    answer's last. Scores of single tokens may stand anywhere among the sampled ones.
    """
    fields = batch.batch
    mask = fields["response_mask"].bool()  # (B, R)
    scores = fields["token_level_scores"]  # (B, R)
    has_reward = scores != 0
    unsampled = has_reward & ~mask & mask.any(1, keepdim=True)
    if unsampled.any():
        place = _first_place(batch, unsampled)
        yield Finding(
            "reward_misplaced",
            f"a reward stands on a token that was not sampled: {place}",
            first_place(batch, unsampled),
        )
        return
    is_environments = "environment_rewards" in fields and torch.equal(
        scores, fields["environment_rewards"]
    )
    if is_environments:
        within_turn = has_reward & _turn_goes_on(fields["turn_ids"])
        if within_turn.any():
            place = _first_place(batch, within_turn)
            yield Finding(
                "reward_misplaced",
                f"an environment's reward stands within a turn: {place}",
                first_place(batch, within_turn),
            )
    elif _all_before_the_end(has_reward, mask):
        place = _first_place(batch, has_reward)
        yield Finding(
            "reward_misplaced",
            f"no reward stands on the last sampled token, but on {place}",
            first_place(batch, has_reward),
        )


def _all_before_the_end(has_reward: Tensor, mask: Tensor) -> bool:
    """Checks whether several rows have one reward each, none of them on the last sampled token."""
    rewarded_rows = has_reward.any(1)
    one_each = (has_reward.sum(1)[rewarded_rows] == 1).all()
    if rewarded_rows.sum() <= 1 or not one_each:
        return False
    last = (mask * torch.arange(mask.shape[1])).amax(1, keepdim=True)
    return not has_reward.gather(1, last)[rewarded_rows].any()


def other_prompts(batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
    """Finds rows whose prompt is not the one that the dataset gave them."""
    of_dataset = batch.non_tensor_batch.get("raw_prompt_ids")
    if of_dataset is None:
        return
    prompts = batch.batch["prompts"].numpy()
    for rows in episodes.first_by_group.values():
        ids = list(of_dataset[rows[0]])
        if ids and prompts[rows[0], -len(ids) :].tolist() != ids:
            yield Finding(
                "prompt_differs",
                f"{_owner(batch, rows[0])} answers another prompt than its own",
                place_of(batch, rows[0]),
            )
            return


def mixed_groups(batch: DataProto, episodes: EpisodeRows, same_tasks: bool) -> Iterator[Finding]:
    """Finds groups that mix prompts.

    Args:
        same_tasks: whether the members of a group begin with the same prompt, and the same seed
            of their environments.
    """
    compared = []
    seeds = batch.non_tensor_batch.get("env_seed")
    # What an agent hears first may be another's answer.
    if same_tasks and not has_several_agents(batch):
        compared.append(batch.batch["prompts"].numpy())
    if same_tasks and seeds is not None:
        compared.append(seeds)
    tasks = batch.non_tensor_batch.get("group_index")
    if tasks is not None:
        compared.append(tasks)
    groups = episodes.first_by_group
    sizes = [len(rows) for rows in groups.values()]
    members = np.array([row for rows in groups.values() for row in rows], dtype=np.int64)
    leaders = np.repeat(np.array([rows[0] for rows in groups.values()], dtype=np.int64), sizes)
    differs = np.zeros(len(members), dtype=bool)
    for values in compared:
        differs |= (values[members] != values[leaders]).reshape(len(members), -1).any(axis=1)
    uids = np.repeat(list(groups), sizes)
    mixed = list(dict.fromkeys(uids[differs].tolist()))
    if mixed:
        yield Finding(
            "groups_mixed",
            f"{len(mixed)} of {len(groups)} groups have episodes of different prompts or tasks, "
            f"as {mixed[0]}",
            Place(group=str(mixed[0])),
        )


def has_several_agents(batch: DataProto) -> bool:
    """Checks whether an environment's episodes have more agents than one."""
    columns = batch.non_tensor_batch
    if "agent_role" not in columns:
        return False
    return len(set(columns["agent_role"])) > len(set(columns["data_source"]))


def uneven_groups(batch: DataProto, episodes: EpisodeRows, size: int) -> Iterator[Finding]:
    """Finds groups of another number of episodes than `rollout.n`."""
    groups = episodes.first_by_group
    # An agent may have several conversations in an episode.
    ids = batch.non_tensor_batch.get("episode_id", np.arange(len(batch)))
    sizes = {uid: len({ids[row] for row in rows}) for uid, rows in groups.items()}
    uneven = [uid for uid, number in sizes.items() if number != size]
    if uneven:
        yield Finding(
            "group_size",
            f"{len(uneven)} of {len(groups)} groups have not {size} episodes, as {uneven[0]} with "
            f"{sizes[uneven[0]]}",
            Place(group=str(uneven[0])),
        )


def equal_answers(batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
    """Finds groups whose members say the same more often than independent draws would.

    Of the first turns, all of which answer one prompt, the others equal a group's first with its
    own probability: the number that do is compared with the sum of these.
    """
    fields = batch.batch
    log_probs = fields.get("rollout_log_probs", fields.get("old_log_probs"))
    if log_probs is None:
        return
    in_answer = fields["response_mask"].numpy().astype(bool)
    if "turn_ids" in fields:
        in_answer = in_answer & (fields["turn_ids"].numpy() == 0)
    ids = fields["responses"].numpy()
    answer_log_probs = np.where(in_answer, log_probs.float().numpy(), 0).sum(1, dtype=np.float64)
    equal = 0
    expected = 0.0
    example = ""
    for uid, rows in episodes.first_by_group.items():
        first, *others = [ids[row][in_answer[row]].tobytes() for row in rows]
        if not first:
            continue
        repeats = others.count(first)
        expected += math.exp(min(answer_log_probs[rows[0]], 0.0)) * len(others)
        equal += repeats
        if repeats and not example:
            example = uid
    if unlikely_excess(equal, expected):
        yield Finding(
            "equal_answers",
            f"{equal} first answers equal that of their group's first member, {expected:.2g} would "
            f"by chance; as in group {example}",
            Place(group=example),
        )


def unlikely_excess(count: int, expected: float) -> bool:
    """Judges whether a count is above chance's, by Chernoff's bound for a Poisson number."""
    if count <= expected:
        return False
    nats = count * math.log(count / max(expected, 1e-300)) - count + expected
    return nats > UNLIKELY


def place_of(batch: DataProto, row: int, token: int | None = None) -> Place:
    """Says to which episode a row belongs, as the viewer finds it."""
    columns = batch.non_tensor_batch
    ids = columns.get("episode_id", columns.get("uid"))
    if ids is None:
        return Place()
    number = int(columns["episode_row"][row]) if "episode_row" in columns else 0
    return Place(episode=str(ids[row]), row=number, token=token)


def first_place(batch: DataProto, wrong: Tensor) -> Place:
    """Says of which episode the first token is where `wrong`, (B, R) bool."""
    row, token = wrong.nonzero()[0].tolist()
    return place_of(batch, row, token)


def _first_place(batch: DataProto, wrong: Tensor) -> str:
    """Names the first token where `wrong`, (B, R) bool."""
    row, token = wrong.nonzero()[0].tolist()
    return f"token {token} of the response of {_owner(batch, row)}"


def _owner(batch: DataProto, row: int) -> str:
    ids = batch.non_tensor_batch.get("episode_id", batch.non_tensor_batch.get("uid"))
    return f"row {row}" if ids is None else f"episode {ids[row]}"


def _turn_goes_on(turns: Tensor) -> Tensor:
    """Marks the tokens whose next one belongs to the same turn: (B, R) bool of turn_ids."""
    return nnf.pad(turns[:, :-1] == turns[:, 1:], (0, 1))
