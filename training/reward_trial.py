"""Tries a run's reward function before any model is loaded, on a made-up answer.

It is called in the kind of thread in which the run's steps call it.
Invariant: what is wrong with the function is one sentence with its file and line, in the list of
problems of the configuration; and nobody's random draws change.
"""

import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from custom.env_calls import code_of, located, raised
from custom.reward_managers.batch import BatchRewardManager
from custom.reward_managers.naive import NaiveRewardManager
from data.chat_templates import encode_chat, pad_token_id
from data.prompt_rows import normalise_row
from data.protocol import DataProto
from data.texts import text_of
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.ray_trainer import RayPPOTrainer
from training.reward import compute_reward, run_beside

logger = logging.getLogger(__name__)

# The trial's answer, where the policy's tokenizer can say it.
ANSWER = "42"
# What has steps score beside the main thread.
THREADED = (
    "reward_model.launch_reward_fn_async, or trainer.async_level with algorithm.filter_groups, has "
    "it run"
)


def try_reward(trainer: RayPPOTrainer) -> None:
    """Calls the trainer's reward function on made-up answers to the first prompt.

    One answer where the function scores row by row, else as many as a prompt gets.

    Raises:
        ConfigError: it raises, or returns what is no reward.
    """
    dataset: Any = trainer.train_dataloader.dataset
    if not _scores(trainer.config) or not hasattr(dataset, "__getitem__"):
        return
    reward_fn = trainer.reward_fn
    answer_ids, answer = made_up_answer(trainer.tokenizer)
    logger.info("the reward function is called on the made-up answer %r", answer)
    with generators_left_alone():
        batch = _made_up_batch(trainer, dataset[0], answer_ids, answers=_answers(trainer))
        try:
            _score_as_the_run_does(trainer.config, batch, reward_fn)
        # Whatever a user's function does.
        except (Exception, SystemExit) as error:
            sentence = _sentence(error, reward_fn, answer)
            if _scores_in_a_thread(trainer.config):
                sentence += f", in a thread of its own, as {THREADED}"
            raise ConfigError([sentence]) from error


def _scores_in_a_thread(config: PPOConfig) -> bool:
    """Checks whether a step calls the reward function in another thread than the main one."""
    beside = config.reward_model.launch_reward_fn_async and not config.reward_model.enable
    ahead = config.trainer.async_level > 0 and config.algorithm.filter_groups.enable
    return beside or ahead


def _score_as_the_run_does(config: PPOConfig, batch: DataProto, reward_fn: Any) -> None:
    """Scores in the kind of thread in which a step does: signals come to the main one alone."""
    score = partial(compute_reward, batch.select(), reward_fn)
    if _scores_in_a_thread(config):
        run_beside(score).result()
    else:
        score()


def made_up_answer(tokenizer: Any) -> tuple[list[int], str]:
    """Returns ANSWER as token ids and as a reward function then reads it.

    A tokenizer of few words may have none for it: then its first token that is a word.
    """
    answers = itertools.chain(
        [tokenizer.encode(ANSWER, add_special_tokens=False)],
        ([token_id] for token_id in range(len(tokenizer))),
    )
    for token_ids in answers:
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        if text.strip().isalnum():
            return token_ids, text
    return [], ""


def _scores(config: PPOConfig) -> bool:
    """Checks whether the reward function is asked at all, beside a reward model."""
    return not config.reward_model.enable or config.custom_reward_function.path is not None


def _answers(trainer: RayPPOTrainer) -> int:
    reward_fn = trainer.reward_fn
    is_batch = isinstance(reward_fn, BatchRewardManager)
    if isinstance(reward_fn, NaiveRewardManager) and not is_batch:
        return 1
    return max(trainer.config.actor_rollout_ref.rollout.n, 2)


def _made_up_batch(
    trainer: RayPPOTrainer, row: Any, answer_ids: list[int], answers: int
) -> DataProto:
    """Makes a batch as the rollout would, of one prompt and as many equal answers."""
    collate: Any = trainer.train_dataloader.collate_fn
    batch = trainer.prompt_batch(collate([row]), answers)
    if trainer.config.plays_dataset_rows:
        prompts = _prompt_of_row(trainer, row, answers)
    else:
        prompts = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"]).batch
    width = trainer.config.data.max_response_length
    token_ids = answer_ids[:width]
    mask = torch.zeros(answers, width, dtype=torch.int8)  # (answers, R)
    mask[:, : len(token_ids)] = 1
    responses = torch.zeros(answers, width, dtype=torch.int32)  # (answers, R)
    responses[:, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
    prompt_mask = prompts["attention_mask"].to(torch.int8)  # (answers, P)
    tensors = {
        "prompts": prompts["input_ids"].to(torch.int32),
        "responses": responses,
        "response_mask": mask,
        "turn_ids": mask.to(torch.int16) - 1,
        "rollout_log_probs": torch.zeros(answers, width),
        "attention_mask": torch.cat([prompt_mask, mask], dim=1),
    }
    return batch.union(DataProto.from_dict(tensors=tensors))


def _prompt_of_row(
    trainer: RayPPOTrainer, row: Mapping[str, Any], answers: int
) -> dict[str, Tensor]:
    """Returns what an episode of the row begins with, cut to its last tokens: (answers, P)."""
    data = trainer.config.data
    token_ids = encode_chat(
        trainer.tokenizer, row[data.prompt_key], **data.apply_chat_template_kwargs
    )
    prompt = normalise_row(
        {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)},
        max_prompt_length=data.max_prompt_length,
        pad_token_id=pad_token_id(trainer.tokenizer),
        truncation="left",
    )
    return {name: prompt[name].expand(answers, -1) for name in ("input_ids", "attention_mask")}


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """Puts back the states of Python's, numpy's and torch's global generators."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _sentence(error: BaseException, reward_fn: Any, answer: str) -> str:
    """Tells what a reward function did, and where it stands."""
    function = user_function(reward_fn)
    code = code_of(function)
    text = text_of(error).partition("\n")[0]
    if code is None or code.co_filename not in text:
        text = f"{located(function, 'the reward function')}: {raised(error, function)}"
    return f"{text}; seen before the first step, with the made-up answer {answer!r}"


def user_function(reward_fn: Any) -> Any:
    """Returns the user's function within a reward manager, or what was given itself."""
    for name in ("compute_score", "reward_fn"):
        inner = getattr(reward_fn, name, None)
        if inner is not None:
            return inner
    return reward_fn
