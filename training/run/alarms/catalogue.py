"""Names every alarm, what to check when it rings, and whether it must stand for two steps.

docs/alarms.md says what each means.
"""

from typing import NamedTuple


class Finding(NamedTuple):
    """Names an alarm, and says what was seen, with the episode and the token."""

    alarm: str
    text: str


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
    "advantages_zero": (
        "rewards within groups: where all are equal nothing is learned; rollout.n, filter_groups"
    ),
    "length_pinned": (
        "data.max_response_length, agent.max_turn_tokens, and whether the end-of-turn token is "
        "sampled"
    ),
    "entropy_collapse": (
        "the learning rate, the sign of entropy_coeff, and what the policy says (episodes_dir)"
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
    "advantages_wrong": "the estimator, and the index, mask and values that it is given",
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
    }
)
