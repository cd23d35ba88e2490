"""Tests what a validation takes from a batch: a sample an episode, whatever rows it has."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from training.validation import ValidationSamples, play_validation

# An answer of a batch: task, episode, number and turn of the row, reward.
Answer = tuple[str, str, int, int, float]


def batch_of(answers: list[Answer], **columns: list[Any]) -> DataProto:
    """Makes a scored batch with a row an answer, three tokens each."""
    uids, episodes, numbers, turns, rewards = zip(*answers, strict=True)
    mask = torch.ones(len(answers), 3, dtype=torch.int64)
    scores = torch.zeros(len(answers), 3)
    scores[:, -1] = torch.tensor(rewards)
    names = {"uid": uids, "episode_id": episodes, "ending": ["done"] * len(answers)} | columns
    return DataProto.from_dict(
        tensors={
            "prompts": mask[:, :1],
            "responses": mask.clone(),
            "response_mask": mask,
            "attention_mask": torch.ones(len(answers), 4, dtype=torch.int64),
            "turn_ids": torch.tensor(turns)[:, None].expand_as(mask).clone(),
            "scores": scores,
        },
        non_tensors={name: object_array(list(values)) for name, values in names.items()}
        | {"episode_row": np.array(numbers)},
    )


class MadeUpTrainer:
    """Plays what it is given, batch by batch, and remembers which groups it was asked for."""

    global_steps = 1
    tokenizer = None
    val_reward_fn = None

    def __init__(self, batches: list[DataProto], n: int, infos: dict[str, list[Any]]) -> None:
        self.val_dataloader = batches
        self.infos = infos
        self.first_groups: list[int] = []
        self.val_generations: list[Any] = []
        self.config = SimpleNamespace(
            trainer=SimpleNamespace(validation_data_dir=None, log_val_generations=0),
            data=SimpleNamespace(reward_fn_key="data_source"),
            actor_rollout_ref=SimpleNamespace(
                rollout=SimpleNamespace(val_kwargs=SimpleNamespace(n=n))
            ),
        )
        self.observers = SimpleNamespace(
            validation_begins=lambda step: None,
            generating=lambda step, validate: nullcontext(),
            scored=lambda batch, scores: None,
            validation_made=lambda facts: {},
        )

    def prompt_batch(self, rows: DataProto, n: int, first_group: int, validate: bool) -> DataProto:
        self.first_groups.append(first_group)
        return rows

    def play(self, prompts: DataProto) -> DataProto:
        return prompts

    def score(self, batch: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        return batch.batch["scores"], self.infos

    def on_batch(self, batch: DataProto) -> None:
        pass


def validated(batches: list[DataProto], n: int, **infos: list[Any]) -> ValidationSamples:
    return play_validation(MadeUpTrainer(batches, n, infos))


def test_what_is_said_of_an_answer_is_that_of_the_row_in_which_the_episode_ends() -> None:
    """Two samples of a task, of two rows each; a's last turn stands in the row that began first."""
    batch = batch_of(
        [("g", "a", 0, 2, 1.0), ("g", "a", 1, 1, 0.0), ("g", "b", 0, 0, 0.0), ("g", "b", 1, 1, 0.0)]
    )
    samples = validated([batch], 2, acc=[1.0, 0.0, 0.5, 0.25], pred=["42", "?", "no answer", "7"])
    assert samples.rewards == [1.0, 0.0]
    assert samples.infos["acc"] == [1.0, 0.25]
    assert samples.infos["pred"] == ["42", "7"]
    assert samples.tokens == [6, 6]


def spoken_by(batch: DataProto, speakers: list[str]) -> DataProto:
    """Names who speaks in each row, as AGENT/NAME."""
    agents = [f"p/{speaker.partition('/')[0]}" for speaker in speakers]
    batch.non_tensor_batch["agent_conversation"] = object_array(speakers)
    batch.non_tensor_batch["agent_role"] = object_array(agents)
    return batch


def test_an_episode_is_one_sample_however_many_conversations_it_has() -> None:
    """The second sample of g has a solver of two rows, who earns 1, and a critic, who earns 0.5."""
    batch = batch_of(
        [
            ("g", "a", 0, 0, 0.25),
            ("g", "b", 0, 0, 0.0),
            ("g", "b", 1, 1, 0.5),
            ("g", "b", 2, 2, 1.0),
        ],
        data_source=["p"] * 4,
    )
    batch = spoken_by(batch, ["solver/0", "solver/0", "critic/0", "solver/0"])
    samples = validated([batch], 2)
    assert samples.uids == ["g", "g"]
    assert samples.sources == ["p", "p"]
    assert samples.rewards == [0.25, 0.75]
    assert samples.tokens == [3, 9]


def test_the_tasks_to_come_are_numbered_by_the_tasks_before_alone() -> None:
    """Task g's episodes have three conversations and one, h's one each; a third batch is like g."""
    talks = [("g", "a", 0, 0, 1.0), ("g", "a", 1, 1, 1.0), ("g", "a", 2, 2, 1.0)]
    first = batch_of([*talks, ("g", "b", 0, 0, 0.0)])
    second = batch_of([("h", "c", 0, 0, 1.0), ("h", "d", 0, 0, 1.0)])
    third = batch_of([("i", "e", 0, 0, 1.0), ("i", "f", 0, 0, 1.0)])
    spoken_by(first, ["solver/0", "solver/1", "critic/0", "solver/0"])
    trainer = MadeUpTrainer([first, second, third], 2, {})
    samples = play_validation(trainer)
    assert trainer.first_groups == [0, 1, 2]
    assert len(samples.uids) == 6
    assert samples.metrics(seed=0)["val-core/unknown/reward/mean@2"] == (0.5 + 1 + 1) / 3
