"""What is proved of a family, each by one function over a `Subject`; all of it is measured.

Every function returns the number that it measured, in nats of log-probs where nothing else is said,
or raises what the product raises. Invariant: a proof goes the product's own ways: its engine, its
layouts of rows, its update, its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import workers.model.state as model_state
from data.protocol import DataProto
from tests.zoo.families import Family
from training.config import ActorConfig, ModelConfig, OptimConfig, PPOConfig, RolloutConfig
from training.config.loader import load_config
from training.config.reference import to_yaml
from training.run import checkpoint_names
from training.run.checkpoint_contents import DriverState, save_driver_state
from workers.dp_actor import DataParallelPPOActor
from workers.hf_rollout import HFRollout
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.forward_settings import ForwardSettings, forward_settings
from workers.model.lora import BASE, base_name
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.packing_check import check_forward, check_training
from workers.model.policy_model import PolicyModel
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.weight_sync.manifest import iter_weights, weight_manifest

# Nats, in float32.
ENGINE_TOLERANCE = 1e-4
ROW_TOLERANCE = 1e-5
# How far planned memory may be from what a run takes.
PLAN_TOLERANCE = 0.1
# What no loss reaches: the routers' corrections are set by a load, not by a gradient.
WITHOUT_GRADIENT = ("correction_bias",)
# Prompts of many lengths, two of which are alike, and answers that end at other times: rows leave a
# batch.
PROMPTS = (1, 2, 5, 19, 33, 19)
ANSWERS = (20, 3, 12, 5, 20, 2)
# The ids from here on are words.
FIRST_WORD = 10
OPTIM = OptimConfig(lr=1e-2)
# The step of the checkpoints, and the steps of the schedule.
STEP = 1
STEPS = 5


@dataclass
class Subject:
    """Holds a family's model as a run has it: the policy, its engine, and how its rows are laid.

    Attributes:
        settings: of the policy's passes, as a run chooses them.
        prompts: of the rows that are played.
    """

    family: Family
    folder: Path
    spec: ModelSpec
    lm: nn.Module
    engine: BaseRollout
    settings: ForwardSettings
    prompts: list[list[int]]

    @classmethod
    def load(cls, family: Family, folder: Path, lora_rank: int = 0) -> Subject:
        """Loads a folder that `Family.make` wrote; with `lora_rank` adapters alone train."""
        config = ModelConfig(
            path=str(folder),
            dtype="float32",
            enable_gradient_checkpointing=False,
            lora_rank=lora_rank,
        )
        spec = ModelSpec(config, str(folder), torch.device("cpu"))
        lm = spec.causal_lm(trainable=True)
        rollout = RolloutConfig(
            dtype="float32",
            response_length=max(ANSWERS),
            max_model_len=max(PROMPTS) + max(ANSWERS),
            max_num_seqs=len(PROMPTS),
        )
        subject = cls(
            family=family,
            folder=folder,
            spec=spec,
            lm=lm,
            engine=HFRollout(rollout, spec),
            settings=forward_settings(config, True, lm, spec.device),
            prompts=[prompt(length, vocabulary_of(lm)) for length in PROMPTS],
        )
        subject.sync()
        return subject

    def sync(self) -> None:
        """Sends the policy's weights to the engine."""
        self.engine.update_weights(
            iter_weights(self.lm, torch.float32, casts=not self.engine.casts_weights),
            weight_manifest(self.lm),
        )

    def play(self, rows: Sequence[int]) -> dict[int, Completion]:
        """Samples the answers of these prompts, all in one batch."""
        for row in rows:
            sampling = Sampling(max_tokens=ANSWERS[row], temperature=1.0, seed=row)
            self.engine.submit(str(row), self.prompts[row], sampling)
        answers: dict[int, Completion] = {}
        while len(answers) < len(rows):
            answers |= {int(done.request_id): done for done in self.engine.step()}
        return answers

    @property
    def rows(self) -> range:
        """Returns the numbers of the rows that are played."""
        return range(len(self.prompts))


def vocabulary_of(lm: nn.Module) -> int:
    """Returns how many tokens a model knows."""
    return lm.config.get_text_config().vocab_size


def prompt(length: int, vocabulary: int) -> list[int]:
    """Draws a prompt; those of one length are alike."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(FIRST_WORD, vocabulary, (length,), generator=generator).tolist()


def as_batch(subject: Subject, answers: dict[int, Completion]) -> DataProto:
    """Lays sampled answers out as the trainer gets them: prompts on the left, answers behind."""
    width = max(len(each) for each in subject.prompts)
    length = max(ANSWERS)
    prompts = torch.zeros(len(answers), width, dtype=torch.long)
    responses = torch.zeros(len(answers), length, dtype=torch.long)
    attention = torch.zeros(len(answers), width + length, dtype=torch.long)
    mask = torch.zeros_like(responses)
    log_probs = torch.zeros(len(answers), length)
    for place, (row, answer) in enumerate(sorted(answers.items())):
        ids = subject.prompts[row]
        count = len(answer.token_ids)
        prompts[place, width - len(ids) :] = torch.tensor(ids)
        responses[place, :count] = torch.tensor(answer.token_ids)
        attention[place, width - len(ids) : width + count] = 1
        mask[place, :count] = 1
        log_probs[place, :count] = torch.tensor(answer.log_probs)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": attention,
            "rollout_log_probs": log_probs,
        }
    )


def actor_of(subject: Subject, optimizer: torch.optim.Optimizer | None = None) -> object:
    """Makes the policy's worker of one rank."""
    config = ActorConfig(ppo_mini_batch_size=len(subject.prompts), grad_clip=1e9)
    policy = PolicyModel(subject.lm, banned_token_ids(subject.engine.config, subject.spec))
    return DataParallelPPOActor(config, policy, optimizer, forward=subject.settings)


def trainer_log_probs(subject: Subject, data: DataProto) -> Tensor:
    """Computes log-probs as a run does, packed or padded: (rows, answer)."""
    log_probs, _ = actor_of(subject).compute_log_prob(data)
    return log_probs


@torch.no_grad()
def own_log_probs(subject: Subject, data: DataProto) -> Tensor:
    """Computes log-probs by the model's own pass over each row alone: (rows, answer)."""
    width = data.batch["prompts"].shape[1]
    result = torch.zeros(data.batch["responses"].shape)
    subject.lm.eval()
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        ids = torch.cat([data.batch["prompts"][row], data.batch["responses"][row]])[real][None]
        logits = subject.lm(input_ids=ids, use_cache=False).logits[0].float()
        logits[:, subject.engine.banned_token_ids] = -torch.inf
        log_probs = logits.log_softmax(-1)
        start = int(real[:width].sum())
        sampled = ids[0, start:]
        count = len(sampled)
        result[row, :count] = log_probs[start - 1 : -1].gather(1, sampled[:, None])[:, 0]
    return result


def largest(difference: Tensor, data: DataProto) -> float:
    """Returns the largest difference over sampled tokens."""
    return float(difference[data.batch["response_mask"].bool()].abs().max())


def mean(difference: Tensor, data: DataProto) -> float:
    """Returns the mean difference over sampled tokens."""
    return float(difference[data.batch["response_mask"].bool()].abs().mean())


def engine_is_trainer(
    subject: Subject, over_tokens: Callable[[Tensor, DataProto], float] = largest
) -> float:
    """Measures how far the engine's log-probs are from the trainer's."""
    data = as_batch(subject, subject.play(subject.rows))
    return over_tokens(data.batch["rollout_log_probs"] - trainer_log_probs(subject, data), data)


def row_beside_others_is_row_alone(subject: Subject) -> float:
    """Measures how far a row that is played beside longer ones is from the row by itself."""
    together = subject.play(subject.rows)
    worst = 0.0
    for row, beside in together.items():
        alone = subject.play([row])[row]
        if alone.token_ids != beside.token_ids:
            return float("inf")
        gap = torch.tensor(alone.log_probs) - torch.tensor(beside.log_probs)
        worst = max(worst, float(gap.abs().max()))
    return worst


def trainer_is_row_alone(subject: Subject) -> float:
    """Measures how far rows as they are laid out, packed or padded, are from each row alone."""
    data = as_batch(subject, subject.play(subject.rows))
    return largest(trainer_log_probs(subject, data) - own_log_probs(subject, data), data)


def update_batch(subject: Subject) -> DataProto:
    """Plays what an update learns from, with advantages that are drawn."""
    data = as_batch(subject, subject.play(subject.rows))
    generator = torch.Generator().manual_seed(0)
    data.batch["advantages"] = torch.randn(data.batch["responses"].shape, generator=generator)
    return data


def update(subject: Subject) -> list[str]:
    """Makes one update; returns the names of what it did not move, though a loss may reach it."""
    data = update_batch(subject)
    before = weights_of(subject)
    actor_of(subject, build_optimizer(subject.lm, OPTIM)).update_policy(data)
    unmoved = differing(before, weights_of(subject), equal=True)
    return [name for name in unmoved if not name.endswith(WITHOUT_GRADIENT)]


def weights_of(subject: Subject) -> dict[str, Tensor]:
    """Copies the policy's parameters."""
    return {name: each.detach().clone() for name, each in subject.lm.named_parameters()}


def differing(
    one: dict[str, Tensor], other: dict[str, Tensor], *, equal: bool = False
) -> list[str]:
    """Lists the tensors that differ in a bit, or with `equal` those that do not."""
    return [name for name, tensor in one.items() if torch.equal(tensor, other[name]) == equal]


def resumed_differs(subject: Subject, run_dir: Path) -> list[str]:
    """Makes two updates, and the second once more from a checkpoint; lists what differs.

    The checkpoint stays in `run_dir`, as of a run.
    """
    data = update_batch(subject)
    optimizer = build_optimizer(subject.lm, OPTIM)
    actor = actor_of(subject, optimizer)
    actor.update_policy(data)
    write_checkpoint(subject, optimizer, run_dir)
    actor.update_policy(data)
    uninterrupted = weights_of(subject)
    again = Subject.load(subject.family, subject.folder)
    optimizer = build_optimizer(again.lm, OPTIM)
    state = (again.lm, optimizer, build_scheduler(optimizer, OPTIM, STEPS))
    folder = run_dir / f"global_step_{STEP}" / "actor"
    model_state.load(folder, state, ("model", "optimizer", "extra"))
    actor_of(again, optimizer).update_policy(data)
    return differing(uninterrupted, weights_of(again))


def write_checkpoint(subject: Subject, optimizer: torch.optim.Optimizer, run_dir: Path) -> None:
    """Writes a checkpoint with a run's own code, and the settings beside it."""
    state = (subject.lm, optimizer, build_scheduler(optimizer, OPTIM, STEPS))
    writer = CheckpointWriter()
    folder = checkpoint_names.start_checkpoint(run_dir, STEP)
    parts = ("model", "optimizer", "extra")
    model_state.save(writer, folder / "actor", state, parts, subject.spec.tokenizer)
    assert writer.is_written(wait=True)
    save_driver_state(folder, DriverState(global_steps=STEP))
    checkpoint_names.complete_checkpoint(folder)
    policy = PPOConfig().actor_rollout_ref
    rollout = replace(policy.rollout, dtype="float32")
    policy = replace(policy, model=subject.spec.config, rollout=rollout)
    (run_dir / "config.yaml").write_text(to_yaml(replace(PPOConfig(), actor_rollout_ref=policy)))


@torch.no_grad()
def exported_is_policy(subject: Subject, run_dir: Path, out: Path) -> float:
    """Exports a policy after an update; measures how far plain transformers' logits are.

    Raises:
        AssertionError: the folder lacks a tensor, or has one that the model does not.
    """
    from features.export.export import export

    with torch.enable_grad():
        optimizer = build_optimizer(subject.lm, OPTIM)
        actor_of(subject, optimizer).update_policy(update_batch(subject))
    write_checkpoint(subject, optimizer, run_dir)
    export(run_dir, out)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 24)[None]
    subject.lm.eval()
    expected = subject.lm(input_ids=ids, use_cache=False).logits
    return float((model.eval()(input_ids=ids, use_cache=False).logits - expected).abs().max())


def training_is_reading(subject: Subject) -> float:
    """Measures how far log-probs in training mode, with gradients, are from those that are read."""
    check_forward(subject.lm)
    check_training(subject.lm)
    data = as_batch(subject, subject.play(subject.rows))
    read = trainer_log_probs(subject, data)
    actor = actor_of(subject)
    actor.actor_module.train()
    trained, _ = actor.forward(data)
    actor.actor_module.eval()
    return largest(trained.detach() - read, data)


@torch.no_grad()
def adapters_are_merged(family: Family, folder: Path) -> tuple[float, float]:
    """Trains adapters for two updates, and sends them merged to the engine.

    Returns: the share of the weights before the head that have adapters; how far the engine's
        log-probs are from those of the trainer, whose adapters stand beside the weights.

    Raises:
        AssertionError: an adapter did not move, or the engine had them before they were sent.
    """
    subject = Subject.load(family, folder, lora_rank=4)
    before = weights_of(subject)
    with torch.enable_grad():
        check_training(subject.lm)
        # The first moves B alone, which was zero.
        for _ in range(2):
            update(subject)
    unmoved = differing(before, weights_of(subject), equal=True)
    idle = [name for name in unmoved if base_name(name) is None]
    assert not idle, f"these did not move: {', '.join(idle)}"
    adapted = 0
    total = 0
    for name, parameter in subject.lm.base_model.named_parameters():
        if base_name(name) is not None:
            total += parameter.numel()
            adapted += parameter.numel() * (BASE in name)
    assert engine_is_trainer(subject) > ENGINE_TOLERANCE, "the update moved nothing"
    subject.sync()
    return adapted / total, engine_is_trainer(subject)


def plan_is_made(subject: Subject) -> bool:
    """Checks that the memory of a run is planned."""
    from features.memory_plan.planner import Planner

    settings = [
        f"actor_rollout_ref.model.path={subject.folder}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.device=cpu",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "algorithm.adv_estimator=grpo",
    ]
    return bool(Planner(load_config(settings, check=False).config).tell())
