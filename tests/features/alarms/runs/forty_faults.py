"""Further faults, of every part of a run, each with who finds it.

They are planted as those of `silent_faults`, and features/alarms/faults.md says who finds each: an
alarm, which stands here, too; a test, the run's page, or nobody.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from custom.envs.guess_number import GuessNumber
from data.protocol import DataProto
from tests.features.alarms.runs.seeded_faults import (
    Fault,
    after,
    column,
    engine_weights,
    estimator,
    generated,
    scores,
    worker,
)
from tests.features.alarms.runs.silent_faults import KL, Case, described, patched
from workers import hf_rollout
from workers.model import update_loop
from workers.rollout import base_rollout, episode, turn_loop

# Data order


def columns_of_the_next_prompt(names: tuple[str, ...]) -> Fault:
    """Columns of the dataset lie a group further than their prompts."""

    def wrong(trainer: Any) -> None:
        size = trainer.config.actor_rollout_ref.rollout.n

        def roll(batch: DataProto) -> None:
            for name in names:
                column_of = batch.non_tensor_batch[name]
                batch.non_tensor_batch[name] = np.roll(column_of, size)

        after(trainer, "prompt_batch", roll)

    return wrong


def columns_of_the_next_row(batch: DataProto) -> None:
    batch.non_tensor_batch["reward_model"] = np.roll(batch.non_tensor_batch["reward_model"], 1)


def half_of_the_prompts_twice(trainer: Any) -> None:
    describe = trainer.prompt_batch

    def doubled(rows: Any, *args: Any, **kwargs: Any) -> DataProto:
        half = len(next(iter(rows.values()))) // 2
        twice: dict[str, Any] = {}
        for name, values in rows.items():
            first = values[:half]
            joined = torch.cat if isinstance(values, torch.Tensor) else np.concatenate
            twice[name] = joined([first, first])
        return describe(twice, *args, **kwargs)

    trainer.prompt_batch = doubled


def every_second_batch_is_skipped(trainer: Any) -> None:
    stream = trainer.row_stream
    draw = stream.draw

    def skipping() -> Any:
        draw()
        return draw()

    stream.draw = skipping


# Tokenisation


def prompts_lose_their_first_token(trainer: Any) -> None:
    """The engine and the trainer read the same, and it is not what the dataset says."""
    own = base_rollout.start_episodes

    def shorter(prompts: DataProto) -> Any:
        episodes = own(prompts)
        for played in episodes:
            played.row.prompt_ids[:] = played.row.prompt_ids[1:]
        return episodes

    patched(base_rollout, "start_episodes", shorter)


def observations_are_lost_in_the_trainer(batch: DataProto) -> None:
    """The trainer does not attend to what the environment said."""
    tensors = batch.batch
    width = tensors["responses"].shape[1]
    told = tensors["attention_mask"][:, -width:].bool() & (tensors["turn_ids"] < 0)
    tensors["attention_mask"][:, -width:][told] = 0


def a_word_is_spelled_in_two_tokens(trainer: Any) -> None:
    """What was sampled is written to text and read again, as other ids of the same text."""
    append = episode.Row.append_sampled

    def retokenised(row: Any, completion: Any, turn: int) -> None:
        ids = list(completion.token_ids)
        if len(ids) > 1:
            ids[0], ids[-2] = ids[-2], ids[0]
        append(row, replace(completion, token_ids=ids), turn)

    patched(episode.Row, "append_sampled", retokenised)


# Weight sync


def every_second_sync(trainer: Any) -> None:
    rollout = worker(trainer).rollout
    update = rollout.update_weights
    calls = itertools.count()

    def sometimes(*args: Any) -> None:
        if next(calls) % 2:
            update(*args)

    rollout.update_weights = sometimes


def averaged(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    """The engine gets a running mean of the weights."""
    for name, tensor in now.items():
        tensor.copy_(0.5 * before[name] + 0.5 * tensor)


def last_rows_of_the_head(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    """A vocabulary that is cut: its last quarter keeps old weights."""
    rows = now["lm_head.weight"].shape[0]
    now["lm_head.weight"][rows * 3 // 4 :] = before["lm_head.weight"][rows * 3 // 4 :]


def norms_in_a_short_type(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    for name, tensor in now.items():
        if "norm" in name:
            tensor.copy_(tensor.bfloat16())


# Sampling


def sampled_otherwise(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Tokens are drawn from `change(log-probs)`; the log-probs reported are those before it."""

    def wrong(trainer: Any) -> None:
        own = hf_rollout.sample_tokens

        def other(logits: torch.Tensor, sampling: Any, generators: Any) -> Any:
            log_probs = logits.log_softmax(-1)
            tokens, _ = own(change(log_probs), sampling, generators)
            return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)

        patched(hf_rollout, "sample_tokens", other)

    return wrong


def without_rare_tokens(log_probs: torch.Tensor) -> torch.Tensor:
    most = log_probs.amax(-1, keepdim=True)
    return torch.where(log_probs < most - 2.5, -1e4, log_probs)


def flatter(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs / 2


def one_seed_for_all_turns(trainer: Any) -> None:
    own = base_rollout.turn_seed

    def first_turns(meta_info: dict[str, Any], played: Any, turn: int | None = None) -> int:
        return own(meta_info, played, 0)

    patched(base_rollout, "turn_seed", first_turns)


def turns_of_one_token(trainer: Any) -> None:
    after(worker(trainer).rollout, "sampling", lambda made: replace(made, max_tokens=1))


# Masks


def every_second_row_is_masked(batch: DataProto) -> None:
    batch.batch["response_mask"][::2] = 0


def unfinished_are_masked(batch: DataProto) -> None:
    facts = batch.non_tensor_batch["episode_facts"]
    unfinished = [row for row, known in enumerate(facts) if known and not known["done"]]
    batch.batch["response_mask"][unfinished] = 0


def best_of_each_group_alone(batch: DataProto) -> None:
    """All but the first of each group are left out."""
    first = batch.non_tensor_batch["sample_index"] == 0
    batch.batch["response_mask"][torch.from_numpy(~first)] = 0


def good_tokens_alone(trainer: Any) -> None:
    """Losses leave out what has a negative advantage."""
    own = update_loop.iter_micro_batches

    def good(data: DataProto, *args: Any) -> Any:
        for rows, micro, inputs in own(data, *args):
            if "advantages" in micro.batch:
                is_good = micro.batch["advantages"] > 0
                mask = micro.batch["response_mask"]
                micro.batch["response_mask"] = mask * is_good.to(mask.dtype)
            yield rows, micro, inputs

    patched(update_loop, "iter_micro_batches", good)


# Group membership


def groups_across(uids: np.ndarray) -> np.ndarray:
    """The k-th samples of all prompts are a group."""
    size = 4
    step = uids[0].rsplit(".", 1)[0]
    names = [f"{step}.{row % size}" for row in range(len(uids))]
    return np.array(names, dtype=object)


def one_group(uids: np.ndarray) -> np.ndarray:
    return np.array([uids[0]] * len(uids), dtype=object)


def pairs(uids: np.ndarray) -> np.ndarray:
    """Each group falls into two."""
    return np.array([f"{uid}{row // 2 % 2}" for row, uid in enumerate(uids)], dtype=object)


# Advantages


def of_the_next_group(own: Any, *args: Any, **kwargs: Any) -> Any:
    advantages, returns = own(*args, **kwargs)
    return advantages.roll(4, 0), returns


def of_the_step_before() -> Callable[..., Any]:
    held: list[Any] = []

    def late(own: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(own(*args, **kwargs))
        mask = kwargs["response_mask"]
        advantages, returns = held[-2 if len(held) > 1 else -1]
        if advantages.shape != mask.shape:
            return held[-1]
        return advantages * mask, returns * mask

    return late


def rows_reversed_in_the_update(trainer: Any) -> None:
    """A mini-batch's rows are put in another order, and their advantages are not."""
    own = update_loop.rows_of_updates

    def wrong(data: DataProto, plan: Any) -> Any:
        found = own(data, plan)
        for rows in found:
            data.batch["advantages"][rows] = data.batch["advantages"][rows.flip(0)]
        return found

    patched(update_loop, "rows_of_updates", wrong)


def on_first_tokens_alone(own: Any, *args: Any, **kwargs: Any) -> Any:
    advantages, returns = own(*args, **kwargs)
    is_first = kwargs["response_mask"].cumsum(-1) == 1
    return advantages * is_first, returns


# Environment replies


def replies_of_another_episode(trainer: Any) -> None:
    """What two episodes of a round are told is swapped, words and rewards."""
    own = turn_loop.TurnLoop._replies

    def swapped(loop: Any, *args: Any) -> Any:
        replies = own(loop, *args)
        keys = [key for key, _ in replies]
        return list(zip(keys[1:] + keys[:1], [reply for _, reply in replies], strict=True))

    patched(turn_loop.TurnLoop, "_replies", swapped)


def words_are_lost(trainer: Any) -> None:
    """From the second turn on the policy hears the first reply again."""
    step = GuessNumber.step

    def deaf(game: Any, action: str) -> Any:
        words, reward, done, info = step(game, action)
        game.first_words = getattr(game, "first_words", words)
        return game.first_words, reward, done, info

    patched(GuessNumber, "step", deaf)


def rewards_a_turn_late(trainer: Any) -> None:
    """A turn is paid for the one before it; the last one for itself, too."""
    own = episode.Episode.add_reward

    def late(played: Any, reward: float) -> None:
        held = getattr(played, "held", 0.0)
        ended = played.turns and played.turns[-1].reply and played.turns[-1].reply.done
        played.held = 0.0 if ended else reward
        own(played, held + reward if ended else held)

    patched(episode.Episode, "add_reward", late)


def step_rewards_twice(trainer: Any) -> None:
    """The environment itself pays twice as much."""
    step = GuessNumber.step

    def generous(game: Any, action: str) -> Any:
        words, reward, done, info = step(game, action)
        return words, 2 * reward, done, info

    patched(GuessNumber, "step", generous)


# Seeds


def reset_draws_for_itself(trainer: Any) -> None:
    reset = GuessNumber.reset
    draw = random.Random(0)
    patched(GuessNumber, "reset", lambda game, seed=None: reset(game, draw.randrange(2**31)))


def reset_with_one_seed(trainer: Any) -> None:
    reset = GuessNumber.reset
    patched(GuessNumber, "reset", lambda game, seed=None: reset(game, 7))


def few_seeds(batch: DataProto) -> None:
    batch.non_tensor_batch["env_seed"] = batch.non_tensor_batch["env_seed"] % 3


def seeds_of_the_first_step(trainer: Any) -> None:
    """Tasks come again every second step."""
    held: dict[int, np.ndarray] = {}

    def again(batch: DataProto) -> None:
        seeds = batch.non_tensor_batch["env_seed"]
        batch.non_tensor_batch["env_seed"] = held.setdefault(trainer.global_steps % 2, seeds)

    after(trainer, "prompt_batch", again)


# Optimiser


def before_updates(change: Callable[[Any], None], model: str = "actor") -> Fault:
    """`change` is made to the optimiser before each update."""

    def wrong(trainer: Any) -> None:
        own = worker(trainer) if model == "actor" else trainer.critic_wg.worker
        update = own._update

        def changed(*args: Any) -> Any:
            change(own.optimizer)
            return update(*args)

        own._update = changed

    return wrong


def emptied(optimizer: Any) -> None:
    optimizer.state.clear()


def states_of_others(optimizer: Any) -> None:
    """Each parameter has the state of the next one of its shape."""
    by_shape: dict[Any, list[Any]] = {}
    for parameter in optimizer.state:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    for members in by_shape.values():
        states = [optimizer.state[parameter] for parameter in members]
        for parameter, state in zip(members, states[1:] + states[:1], strict=True):
            optimizer.state[parameter] = state


def first_moments_lost(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def counts_lost(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def backward_twice(trainer: Any) -> None:
    own = torch.Tensor.backward

    def twice(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        own(tensor, retain_graph=True)
        own(tensor, *args, **kwargs)

    patched(torch.Tensor, "backward", twice)


def micro_batches_twice(trainer: Any) -> None:
    own = update_loop.iter_micro_batches

    def doubled(data: DataProto, *args: Any) -> Any:
        yield from own(data, *args)
        if "advantages" in data.batch:
            yield from own(data, *args)

    patched(update_loop, "iter_micro_batches", doubled)


def gradients_doubled(trainer: Any) -> None:
    own = worker(trainer).actor
    after(own, "_backward", lambda result: [p.grad.mul_(2) for p in own.module.parameters()])


def parameters_replaced(trainer: Any) -> None:
    """The module has new parameters, of which the optimiser knows nothing."""
    module = worker(trainer).actor.actor_module
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.detach().clone())


def not_clipped(trainer: Any) -> None:
    own = update_loop.clip_grad_norm
    patched(update_loop, "clip_grad_norm", lambda module, most: own(module, 1e9))


def decay_a_hundredfold(trainer: Any) -> None:
    for group in worker(trainer).optimizer.param_groups:
        group["weight_decay"] *= 100


# Reference and critic


def reference_of_other_rows(trainer: Any) -> None:
    def roll(result: DataProto) -> None:
        result.batch["ref_log_prob"] = result.batch["ref_log_prob"].roll(1, 0)

    after(trainer.ref_policy_wg, "compute_ref_log_prob", roll)


def values_a_token_late(trainer: Any) -> None:
    """The critic's values are those of the token before, in both of its passes."""
    own = trainer.critic_wg.worker.critic
    after(own, "micro_forward", lambda outputs: [output.roll(1, 1) for output in outputs])


def critic_learns_rewards(trainer: Any) -> None:
    own = trainer.critic_wg.worker.critic
    loss = own.micro_loss

    def rewards(micro: DataProto, *args: Any) -> Any:
        micro.batch["returns"] = 0 * micro.batch["returns"]
        return loss(micro, *args)

    own.micro_loss = rewards


# Logging


def logged(name: str, change: Callable[[float], float]) -> Fault:
    def wrong(trainer: Any) -> None:
        def other(metrics: dict[str, float]) -> None:
            if name in metrics:
                metrics[name] = change(metrics[name])

        after(trainer, "_step_metrics", other)

    return wrong


def means_of_turn_scores(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Scores are divided by the number of a row's turns."""
    turns = batch.batch["turn_ids"].amax(1, keepdim=True) + 1
    return given / turns.clamp(min=1)


SEEDED = (
    "agent.environment.isolation=thread",
    "data.train_batch_size=16",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
)
SMALL_MICRO = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",)
IN_THREADS = ("agent.environment.isolation=thread",)
GUESS = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
MANY = ("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32")

FORTY: dict[str, Case] = {
    "ground truths of the next prompt": Case(
        columns_of_the_next_prompt(("reward_model",)),
        (),
        "prompts",
        ("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
    ),
    "ground truths of the next row": Case(
        described(columns_of_the_next_row), ("truth_differs",), "prompts"
    ),
    "half of the prompts twice": Case(half_of_the_prompts_twice, ("tasks_repeat",), "prompts"),
    "every second batch skipped": Case(every_second_batch_is_skipped, (), "prompts"),
    "prompts lose their first token": Case(
        prompts_lose_their_first_token, ("prompt_differs",), "prompts"
    ),
    "observations not attended to": Case(
        generated(observations_are_lost_in_the_trainer), ("log_probs_differ", "turn_differs")
    ),
    "tokens of a word swapped": Case(
        a_word_is_spelled_in_two_tokens, ("log_probs_differ", "turn_differs"), "guess"
    ),
    "every second sync": Case(every_second_sync, ("engine_stale",)),
    "the engine has averaged weights": Case(
        engine_weights(averaged), ("engine_stale", "engine_differs")
    ),
    "a quarter of the head is stale": Case(
        engine_weights(last_rows_of_the_head), ("engine_differs",)
    ),
    "norms rounded": Case(engine_weights(norms_in_a_short_type), ("engine_differs",)),
    "rare tokens never sampled": Case(
        sampled_otherwise(without_rare_tokens), ("samples_biased",), "guess", MANY
    ),
    "samples flatter than reported": Case(
        sampled_otherwise(flatter), ("samples_biased",), "guess", MANY
    ),
    "one sampling seed for all turns": Case(one_seed_for_all_turns, (), "guess"),
    "turns of one token": Case(turns_of_one_token, ("length_pinned",), "guess"),
    "every second row masked": Case(generated(every_second_row_is_masked), ("episodes_masked",)),
    "unfinished episodes masked": Case(
        generated(unfinished_are_masked), ("episodes_masked",), "guess", ("agent.max_turn=2",)
    ),
    "one member of each group left": Case(
        generated(best_of_each_group_alone), ("episodes_masked",)
    ),
    "good tokens alone": Case(good_tokens_alone, ("tokens_missing",)),
    "groups across prompts": Case(
        column("uid", groups_across), ("group_size", "groups_mixed"), "guess"
    ),
    "one group": Case(column("uid", one_group), ("group_size", "groups_mixed")),
    "groups in two": Case(column("uid", pairs), ("group_size",)),
    "advantages of the next group": Case(estimator(of_the_next_group), ("advantages_wrong",)),
    "advantages of the step before": Case(estimator(of_the_step_before()), ("advantages_wrong",)),
    "advantages in another order than rows": Case(
        rows_reversed_in_the_update, ("advantages_wrong",)
    ),
    "advantages on first tokens": Case(estimator(on_first_tokens_alone), ()),
    "replies of another episode": Case(replies_of_another_episode, (), "guess", SEEDED),
    "first replies again": Case(words_are_lost, (), "guess", IN_THREADS),
    "rewards a turn late": Case(rewards_a_turn_late, (), "gae"),
    "the environment pays twice": Case(step_rewards_twice, (), "guess", IN_THREADS),
    "reset draws for itself": Case(reset_draws_for_itself, ("seed_ignored",), "guess", SEEDED),
    "reset with one seed": Case(reset_with_one_seed, ("seed_ignored",), "guess", SEEDED),
    "three seeds": Case(described(few_seeds), ("tasks_repeat",), "guess"),
    "tasks of two steps before": Case(seeds_of_the_first_step, ("tasks_repeat",), "guess"),
    "optimiser state emptied": Case(before_updates(emptied), ("optimizer_changed",)),
    "optimiser states of others": Case(before_updates(states_of_others), ("optimizer_changed",)),
    "first moments lost": Case(before_updates(first_moments_lost), ("optimizer_changed",)),
    "optimiser counts lost": Case(before_updates(counts_lost), ("optimizer_changed",)),
    "critic's optimiser emptied": Case(
        before_updates(emptied, "critic"), ("optimizer_changed",), "gae"
    ),
    "gradient taken twice": Case(backward_twice, ("gradients_doubled",), settings=SMALL_MICRO),
    "micro-batches twice": Case(micro_batches_twice, ("tokens_missing",), settings=SMALL_MICRO),
    "gradients doubled": Case(gradients_doubled, ("gradients_lost",)),
    "parameters replaced": Case(
        parameters_replaced,
        ("policy_still", "optimizer_changed"),
        settings=("trainer.save_freq=-1",),
    ),
    "gradients not clipped": Case(not_clipped, ()),
    "decay a hundredfold": Case(decay_a_hundredfold, ()),
    "reference of other rows": Case(reference_of_other_rows, ("kl_jump",), settings=KL),
    "values a token late": Case(values_a_token_late, (), "gae"),
    "critic learns rewards": Case(critic_learns_rewards, ("tokens_missing",), "gae"),
    "reward means doubled in the log": Case(
        logged("critic/score/mean", lambda value: 2 * value), ()
    ),
    "entropy of the log negative": Case(logged("actor/entropy", lambda value: -value), ()),
    "scores divided by turns": Case(scores(means_of_turn_scores), ("reward_differs",), "guess"),
}
