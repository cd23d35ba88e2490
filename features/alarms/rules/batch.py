"""Finds tokens that are trained on wrongly, and rewards at wrong places, whatever the policy does.

A batch of a user's own that lacks a column is not judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from custom.reward_managers.unscored import UNSCORED
from features.alarms.finding import (
    Finding,
    first_place,
    first_token_name,
    owner_name,
    place_of,
)
from features.alarms.rule import rule
from features.alarms.seen_step import SeenStep
from training.batch.episode_rows import REWARD_INFO


@rule(
    "unsampled_tokens",
    advice="response_mask and turn_ids: is one shifted, or made of the attention mask?",
    view="sort=-tokens",
    color="fate",
    order=10,
)
def unsampled_tokens(seen: SeenStep) -> Iterator[Finding]:
    """Finds tokens that are trained on and were not sampled."""
    batch = seen.batch
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
            f"policy, first {first_token_name(batch, wrong)}",
            first_place(batch, wrong),
        )


@rule(
    "reward_misplaced",
    advice="what turns scores into token_level_scores: shifted, or placed by another mask?",
    view="sort=-reward",
    color="fate",
    order=20,
)
def misplaced_rewards(seen: SeenStep) -> Iterator[Finding]:
    """Finds rewards on tokens that were not sampled, or that do not end what they pay for.

    An environment's reward stands on the last token of its turn, a score of a whole answer on the
    answer's last. Scores of single tokens may stand anywhere among the sampled ones.
    """
    batch = seen.batch
    fields = batch.batch
    mask = fields["response_mask"].bool()  # (B, R)
    scores = fields["token_level_scores"]  # (B, R)
    has_reward = scores != 0
    unsampled = has_reward & ~mask & mask.any(1, keepdim=True)
    if unsampled.any():
        place = first_token_name(batch, unsampled)
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
            place = first_token_name(batch, within_turn)
            yield Finding(
                "reward_misplaced",
                f"an environment's reward stands within a turn: {place}",
                first_place(batch, within_turn),
            )
    elif _all_before_the_end(has_reward, mask):
        place = first_token_name(batch, has_reward)
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


@rule(
    "tokens_left_out",
    advice="response_mask: the policy sampled these tokens, and learns nothing of them",
    view="sort=-tokens",
    color="fate",
    order=150,
)
def tokens_left_out(seen: SeenStep) -> Iterator[Finding]:
    """Finds sampled tokens that are not trained on, in episodes of which others are.

    Sampled are those that have a turn, or a log-prob of the engine's; and each episode's facts
    count them, and those that are left out as the config, or its environment, says.
    """
    # A correction leaves tokens out on purpose.
    if seen.config.algorithm.rollout_correction.corrects:
        return
    batch = seen.batch
    fields = batch.batch
    mask = fields["response_mask"].bool()  # (B, R)
    sampled = torch.zeros_like(mask)
    if "turn_ids" in fields:
        sampled |= fields["turn_ids"] >= 0
    if "rollout_log_probs" in fields:
        sampled |= fields["rollout_log_probs"] != 0
    left_out = sampled & ~mask & mask.any(1, keepdim=True)
    for rows, facts in seen.played_episodes():
        if facts.get("untrained_tokens"):
            left_out[rows] = False
    if left_out.any():
        yield Finding(
            "tokens_left_out",
            f"{int(left_out.sum())} of {int(sampled.sum())} sampled tokens are not trained on, "
            f"first {first_token_name(batch, left_out)}",
            first_place(batch, left_out),
        )
        return
    lengths = mask.sum(1).tolist()
    for rows, facts in seen.played_episodes():
        trained = sum(lengths[row] for row in rows)
        wanted = facts["sampled_tokens"] - facts.get("untrained_tokens", 0)
        if trained != wanted:
            yield Finding(
                "tokens_left_out",
                f"{trained} tokens of episode {batch.non_tensor_batch['episode_id'][rows[0]]} are "
                f"trained on, {wanted} were sampled to be",
                place_of(batch, rows[0]),
            )
            return


@rule(
    "episodes_masked",
    advice=(
        "what sets response_mask to 0; the trainer leaves out failed episodes, what a correction "
        "rejects, groups that are too old and episodes that a judge did not score"
    ),
    view="empty=1&sort=-reward",
    color="fate",
    order=155,
)
def masked_episodes(seen: SeenStep) -> Iterator[Finding]:
    """Finds episodes that the policy played and that nothing is trained on, for no known reason.

    A correction of the rollout leaves rows out on purpose, as do groups that are too old, and
    greedy answers (`reward_baselines`) that a judge did not score.
    """
    fields = seen.batch.batch
    corrects = seen.config.algorithm.rollout_correction.corrects
    is_stale = seen.metrics.get("async/dropped_groups", 0.0) > 0
    if corrects or is_stale or "reward_baselines" in fields or "turn_ids" not in fields:
        return
    was_sampled = (fields["turn_ids"] >= 0).any(1).tolist()
    is_trained_on = fields["response_mask"].any(1).tolist()
    unscored = seen.batch.non_tensor_batch.get(REWARD_INFO + UNSCORED, [None] * len(was_sampled))
    is_real = seen.episodes.real.tolist()
    played = 0
    masked = []
    for rows in seen.episodes.rows:
        if not is_real[rows[0]] or not any(was_sampled[row] for row in rows):
            continue
        played += 1
        has_reason = any(unscored[row] for row in rows)
        if not has_reason and not any(is_trained_on[row] for row in rows):
            masked.append(rows[0])
    if masked:
        yield Finding(
            "episodes_masked",
            f"nothing of {len(masked)} of {played} episodes is trained on, and nothing asked for "
            f"it; first {owner_name(seen.batch, masked[0])}",
            place_of(seen.batch, masked[0]),
        )


@rule(
    "end_ignored",
    advice="the engine's stop tokens against the tokenizer's eos_token_id",
    view="sort=-tokens",
    color="fate",
    order=160,
)
def ignored_ends(seen: SeenStep) -> Iterator[Finding]:
    """Finds turns that went on behind the token that ends them."""
    tokenizer = seen.run.tokenizer
    eos_token_id = tokenizer.eos_token_id if tokenizer is not None else None
    if eos_token_id is None or seen.config.actor_rollout_ref.rollout.ignore_eos:
        return
    batch = seen.batch
    fields = batch.batch
    if "turn_ids" not in fields:
        return
    is_end = fields["response_mask"].bool() & (fields["responses"] == eos_token_id)
    goes_on = is_end & _turn_goes_on(fields["turn_ids"])
    if goes_on.any():
        yield Finding(
            "end_ignored",
            f"{int(goes_on.sum())} turns went on behind their end, first at "
            f"{first_token_name(batch, goes_on)}",
            first_place(batch, goes_on),
        )


def _turn_goes_on(turns: Tensor) -> Tensor:
    """Marks the tokens whose next one belongs to the same turn: (B, R) bool of turn_ids."""
    return nnf.pad(turns[:, :-1] == turns[:, 1:], (0, 1))
