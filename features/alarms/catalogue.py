"""Names every alarm, what to check when it rings, and whether it must stand for two steps.

features/alarms/README.md says what each means.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from training.config.section import PROJECT_ROOT

# The page that says what each alarm means; it may lie in either place.
PAGES = (Path(__file__).with_name("README.md"), PROJECT_ROOT / "docs" / "alarms.md")


class Place(NamedTuple):
    """Names the episode that shows what an alarm says, or the group.

    Attributes:
        episode: its `episode_id`; "": none is known.
        row, token: of the episode's rows, and of that row's response; None: not known.
        group: the `uid` of its group.
    """

    episode: str = ""
    row: int = 0
    token: int | None = None
    group: str = ""


class Finding(NamedTuple):
    """Names an alarm, and says what was seen, with the episode and the token."""

    alarm: str
    text: str
    place: Place = Place()


# What to check, by alarm.
ADVICE = {
    "engine_differs": (
        "the weight sync, rollout.dtype and model.dtype, the engine's own settings (engine_kwargs)"
    ),
    "engine_stale": (
        "the weight sync: did all tensors arrive? Answers since then are another policy's"
    ),
    "policy_still": (
        "the optimiser's parameters, the learning rate and the gradient: the update changed nothing"
    ),
    "log_probs_differ": (
        "temperature, top_k and top_p of the engine, its dtype, the weight sync, the response mask"
    ),
    "turn_differs": (
        "the tokens between turns: does the trainer read what the engine read? The chat template, "
        "tools"
    ),
    "samples_biased": (
        "the engine's temperature and filters against the log-probs that it reports, which are "
        "those before them, perhaps (logprobs_mode)"
    ),
    "ratio_not_one": (
        "dropout, temperature and masks of the two passes: before the first update they are one "
        "policy"
    ),
    "not_finite": "the learning rate, the dtype, and what gave that number",
    "gradient_not_finite": (
        "the learning rate, the dtype, rewards of extreme size; such updates are skipped"
    ),
    "gradient_zero": (
        "what the loss is made of: there is something to learn, and no gradient comes of it"
    ),
    "reward_constant": (
        "the reward function: does it read the answers? The answers: can the policy earn anything?"
    ),
    "silence_paid": "the reward: what does it make of an empty text? A policy learns to be silent",
    "advantages_zero": (
        "rewards within groups: where all are equal nothing is learned; rollout.n, filter_groups"
    ),
    "length_pinned": (
        "data.max_response_length, agent.max_turn_tokens, and whether the end-of-turn token is "
        "sampled"
    ),
    "entropy_collapse": (
        "the learning rate, the sign of entropy_coeff, and what the policy says (the episodes)"
    ),
    "kl_explodes": "the learning rate and grad_clip: after one such step a policy hardly recovers",
    "kl_jump": ("the learning rate, ppo_epochs, grad_clip: one step changes the policy too much"),
    "equal_answers": "the sampling seeds of a group's members, and rollout.temperature",
    "large_step": (
        "that batch's rewards and advantages, the learning rate and grad_clip; go back to the "
        "checkpoint before it"
    ),
    "kl_negative": "the KL's estimate, and the order of its arguments: policy, then reference",
    "reference_moves": "what else writes the reference's weights, and which model it is",
    "reference_differs": "ref.model and its dtype: before the first update it is the policy",
    "part_still": (
        "requires_grad, detach and no_grad on the way to these tensors, and the optimiser's groups"
    ),
    "gradients_kept": "optimizer.zero_grad: each update adds its gradient to that of the last one",
    "gradients_lost": "what zeroes or scales gradients between micro-batches: they add up",
    "gradient_misled": "the loss: its sign, and which rows' advantages, or returns, it reads",
    "tokens_missing": "how a batch is cut into mini-batches and micro-batches",
    "updates_differ": "what else calls optimizer.step: each mini-batch is one update",
    "values_differ": (
        "dropout and masks of the critic's two passes, and the order of values: before the first "
        "update they are the same"
    ),
    "values_constant": "the critic: its head, its learning rate, its inputs",
    "prompts_pinned": "data.max_prompt_length: cut prompts are not the tasks that were meant",
    "nothing_sampled": "environments that fail, and max_model_len: these episodes train nothing",
    "end_ignored": "the engine's stop tokens against the tokenizer's eos_token_id",
    "rate_differs": "the scheduler: which base rate has it, and how often is it stepped?",
    "advantages_wrong": (
        "the estimator, and the index, mask and values that it is given; one that you changed says "
        "what it keeps where it is registered (ordered, compares, follows_returns)"
    ),
    "tasks_repeat": "what env_seed or the prompts are made of: run, step and group",
    "answers_repeat": "the sampling seeds: they are of run, step, group, sample and turn",
    "groups_copied": "what repeats, refills or collects groups: one is trained on twice",
    "prompt_differs": "what orders the rows: tensors and columns of a row belong together",
    "group_size": "uid of the rows, and what drops or adds them: a group has rollout.n episodes",
    "reward_differs": "what lies between the reward's source and token_level_scores",
    "tokens_left_out": "response_mask: the policy sampled these tokens, and learns nothing of them",
    "unsampled_tokens": (
        "response_mask and turn_ids: is one shifted, or made of the attention mask?"
    ),
    "reward_misplaced": (
        "what turns scores into token_level_scores: shifted, or placed by another mask?"
    ),
    "groups_mixed": "uid of the rows: answers to different prompts are compared",
    "template_changed": (
        "the tokenizer and data.apply_chat_template_kwargs: prompts are written in another way"
    ),
    "tool_fails": (
        "the tool's code, or its server: the episodes have what it answered, the log has the first "
        "exception of its code"
    ),
    "rate_zero": ("the scheduler and its total steps: nothing is learned at a learning rate of 0"),
    "throughput_falls": (
        "what else runs here, and the environment; timing_s/* say which section of the step grew"
    ),
    "memory_grows": ("what keeps steps' data alive: environments, hooks, reward functions, caches"),
}

# Findings that may be chance, or pass: they must stand for two steps.
WAITS = frozenset(
    {
        "reward_constant",
        "silence_paid",
        "advantages_zero",
        "length_pinned",
        "rate_zero",
        "throughput_falls",
        "memory_grows",
        "kl_jump",
        "part_still",
        "prompts_pinned",
        "nothing_sampled",
        "values_constant",
        "tool_fails",
    }
)

# The episodes that show what an alarm says, as the viewer finds and sorts them; of the others the
# step's. An engine's weights that were not synced show in the steps that follow.
OF_ANY_STEP = frozenset({"engine_differs", "engine_stale", "reference_moves"})
VIEWS = {
    "engine_differs": "sort=-mismatch",
    "engine_stale": "sort=-mismatch",
    "log_probs_differ": "sort=-mismatch",
    "turn_differs": "sort=-mismatch",
    "template_changed": "sort=-mismatch",
    "not_finite": "sort=-mismatch",
    "samples_biased": "sort=entropy",
    "entropy_collapse": "sort=entropy",
    "ratio_not_one": "sort=-ratio",
    "large_step": "sort=-ratio",
    "kl_explodes": "sort=-ratio",
    "kl_jump": "sort=-kl",
    "kl_negative": "sort=-kl",
    "reference_moves": "sort=-kl",
    "reference_differs": "sort=-kl",
    "policy_still": "sort=-advantage",
    "part_still": "sort=-advantage",
    "gradients_kept": "sort=-gradient",
    "gradients_lost": "sort=-gradient",
    "gradient_not_finite": "sort=-gradient",
    "gradient_zero": "sort=-advantage",
    "gradient_misled": "sort=-advantage",
    "tokens_missing": "sort=-advantage",
    "advantages_wrong": "sort=-advantage",
    "values_differ": "sort=-advantage",
    "values_constant": "sort=-advantage",
    "reward_constant": "spread=0&sort=-reward",
    "advantages_zero": "spread=0&sort=-reward",
    "reward_differs": "sort=-reward",
    "reward_misplaced": "sort=-reward",
    "silence_paid": "empty=1&sort=-reward",
    "nothing_sampled": "empty=1&sort=-reward",
    "length_pinned": "sort=-tokens",
    "prompts_pinned": "sort=-tokens",
    "end_ignored": "sort=-tokens",
    "tokens_left_out": "sort=-tokens",
    "unsampled_tokens": "sort=-tokens",
    "equal_answers": "sort=tokens",
    "answers_repeat": "sort=tokens",
    "throughput_falls": "sort=-seconds",
    "memory_grows": "sort=-tokens",
    "tool_fails": "sort=-turns",
}
# How the tokens of an episode are coloured that an alarm names.
COLORS = {
    "unsampled_tokens": "fate",
    "tokens_left_out": "fate",
    "end_ignored": "fate",
    "reward_misplaced": "fate",
    "reward_differs": "advantage",
}


def view_of(finding: Finding, step: int) -> str:
    """Returns the viewer's address, behind its #, of what a finding of this step is about."""
    place = finding.place
    if place.episode:
        address = f"episode/0/train/{step}/{quote(place.episode, safe='')}?row={place.row}"
        if place.token is not None:
            address += f"&token={place.token}"
        color = COLORS.get(finding.alarm)
        return f"{address}&color={color}" if color else address
    if place.group:
        return f"group/0/train/{step}/{quote(place.group, safe='')}"
    parts = ["kind=train"]
    if finding.alarm not in OF_ANY_STEP:
        parts.append(f"step={step}")
    if finding.alarm in VIEWS:
        parts.append(VIEWS[finding.alarm])
    return f"list?{'&'.join(parts)}"


def page() -> Path | None:
    """Returns the page that says what each alarm means, where it is there."""
    return next((place for place in PAGES if place.is_file()), None)


@cache
def meanings() -> dict[str, str]:
    """Reads what the alarms' page says that each alarm means; nothing where it is not there."""
    place = page()
    if place is None:
        return {}
    found = {}
    for line in place.read_text(encoding="utf-8").splitlines():
        cells = line.split(" | ")
        if len(cells) == 2 and cells[0].startswith("| `"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = cells[1].removesuffix(" |").strip()
    return found
