"""Tries a run's advantage estimator and policy loss before any model is loaded, on made-up numbers.

    two groups of made-up rows -> KL in the reward -> advantages -> the loss of one micro-batch

The steps are the run's own: `StepPhases` hands the estimator what it hands it in a step, and
`micro_loss` calls the loss, so that edits of either are tried as well. Invariant: what is wrong is
one sentence with the function, its file and line, among the problems of the configuration; and
nobody's random draws change.
"""

import inspect
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from custom.env_calls import code_of, located, raised, shown
from data.array_ops import object_array
from data.batch_fields import FIELDS
from data.protocol import DataProto
from data.seeds import sample_ids, step_info
from training.advantage import BRANCH_COLUMNS
from training.async_rollout.group_streaming import streams_groups
from training.batch.episode_rows import REWARD_INFO
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.section import PROJECT_ROOT
from training.core_algos import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    policy_loss_formula,
    seeded_draws,
)
from training.core_algos.built_in import ESTIMATOR_INPUTS
from training.reward_trial import generators_left_alone
from training.rollout_correction import apply_correction
from training.step_phases import StepPhases
from workers.dp_actor import DataParallelPPOActor, Loss
from workers.model.builder import find_device
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import POLICY_LOSS_FIELDS, VALUE_LOSS_FIELDS, LossFields
from workers.model.mini_batches import global_counts

logger = logging.getLogger(__name__)

# The made-up rows have so many tokens in a prompt, and in a response at most.
PROMPT_LENGTH = 2
RESPONSE_LENGTH = 6
GROUPS = 2
# These settings give an estimator or a loss the inputs that not every run has.
GIVEN_BY = {
    "rollout_is_weights": "algorithm.rollout_correction.rollout_is gives them",
    "rollout_log_probs": "actor_rollout_ref.rollout.calculate_log_probs=true gives them",
    "rollout_log_prob": "actor_rollout_ref.rollout.calculate_log_probs=true gives them",
    "ref_log_prob": "actor_rollout_ref.actor.use_kl_loss=true gives it, or needs of the estimator",
    "values": "critic.enable=true gives them, or needs of the estimator",
    "old_log_probs": "needs of the estimator gives them",
    "sum_pi_squared": "needs of the estimator gives it",
    "reward_baselines": "needs of the estimator gives them",
    "branch_returns": "needs of the estimator gives them",
    "observation_mask": "agent.observation_loss_coef gives it",
}
# Code that is not to blame for what others look for.
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
BATCH_CODE = PROJECT_ROOT / "data"
# By these an estimator reads columns that nobody can make up.
READS_COLUMNS = ("batch", "non_tensor_batch")


class CannotTry(Exception):
    """Says why a function cannot be tried, although nothing is wrong with it."""


def try_algorithm(config: PPOConfig) -> None:
    """Calls the config's estimator and policy loss once, as a step would.

    Raises:
        ConfigError: one of them raises, returns what it must not, needs what the run does not give,
            or is a loss that the policy gets no gradient of.
    """
    config = config.with_correction
    with generators_left_alone():
        batch = made_up_batch(config)
        problems = list(_try_estimator(config, batch))
        if "advantages" not in batch.batch:
            batch.batch["advantages"] = _signs(batch) * batch.batch["response_mask"]
            batch.batch["returns"] = batch.batch["advantages"]
        problems += _try_loss(config, batch)
    if problems:
        raise ConfigError(problems)


def made_up_batch(config: PPOConfig) -> DataProto:
    """Makes a batch as it stands before advantages, (B, R) as fields.yaml says.

    Of each group one row more than before is right, the lengths differ, and each row of a run in
    environments has two turns with a token of the environment between them.
    """
    groups = 1 if streams_groups(config) else GROUPS
    samples = config.actor_rollout_ref.rollout.n
    size = groups * samples
    width = min(config.data.max_response_length, RESPONSE_LENGTH)
    lengths = torch.arange(size) % width + 1
    attended = torch.arange(width) < lengths[:, None]  # (B, R)
    turn_ids = torch.where(attended, 0, -1)
    if config.environments and width > 2:
        turn_ids[:, 1][lengths > 2] = -1
        turn_ids[:, 2:][attended[:, 2:]] = 1
    mask = turn_ids >= 0
    prompts = torch.ones(size, PROMPT_LENGTH, dtype=torch.int32)
    tensors = {
        "prompts": prompts,
        "responses": attended.int(),
        "response_mask": mask.to(torch.int8),
        "attention_mask": torch.cat([prompts, attended.int()], dim=1).to(torch.int8),
        "turn_ids": turn_ids.to(torch.int16),
    }
    scores = torch.zeros(size, width)
    scores[torch.arange(size), lengths - 1] = (torch.arange(size) % 2).float()
    tensors["token_level_scores"] = scores
    tensors |= _fields_of_models(config, mask)
    columns = sample_ids(range(groups), samples, step=1) | _columns(config, size)
    batch = DataProto.from_dict(tensors=tensors, non_tensors=columns)
    batch.meta_info = step_info(step=1, seed=config.data.run_seed)
    return batch


def _fields_of_models(config: PPOConfig, mask: Tensor) -> dict[str, Tensor]:
    """Makes up what policy, reference and critic give in this run, (B, R) each, (B,) baselines."""
    generator = torch.Generator().manual_seed(0)

    def log_probs() -> Tensor:
        drawn = -1 - 0.1 * torch.rand(mask.shape, generator=generator)
        return torch.where(mask, drawn, 0)

    phases = StepPhases(config, None, None)  # type: ignore[arg-type]
    needs = config.estimator_needs
    fields = {}
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        fields["rollout_log_probs"] = log_probs()
    if phases.needs_old_log_probs():
        fields["old_log_probs"] = log_probs()
    if "sum_pi_squared" in needs:
        fields["sum_pi_squared"] = log_probs().exp() * mask
    if config.need_reference:
        fields["ref_log_prob"] = log_probs()
    if config.need_values:
        fields["values"] = -log_probs()
    if "reward_baselines" in needs:
        fields["reward_baselines"] = torch.full((len(mask),), 0.25)
    return fields


def _columns(config: PPOConfig, size: int) -> dict[str, np.ndarray]:
    """Makes up the columns that rows have beside their names, (B,) each."""
    columns: dict[str, np.ndarray] = {}
    for key in config.algorithm.gdpo_reward_keys:
        columns[REWARD_INFO + key] = object_array([float(row % 2) for row in range(size)])
    if "branch_returns" in config.estimator_needs:
        columns["branch_returns"] = object_array([[[0.25, 0.75], [0.5]] for _ in range(size)])
    if config.environments:
        columns["anchors"] = object_array([["first", "second"] for _ in range(size)])
    return columns


def _signs(batch: DataProto) -> Tensor:
    """Returns 1 and -1 in turn, (B, 1)."""
    return 1.0 - 2.0 * (torch.arange(len(batch)) % 2)[:, None]


# The estimator


def _try_estimator(config: PPOConfig, batch: DataProto) -> Iterator[str]:
    """Adds advantages to the batch; yields what keeps the estimator from a step."""
    name = config.algorithm.adv_estimator
    function = get_adv_estimator_fn(name)
    phases = StepPhases(config, None, None)  # type: ignore[arg-type]
    correction = config.algorithm.rollout_correction
    try:
        if correction.corrects and "old_log_probs" in batch.batch:
            apply_correction(batch, correction)
        phases.apply_kl_penalty(batch)
        branched = [column for column in BRANCH_COLUMNS if column in batch.non_tensor_batch]
        offered = {*batch.batch.keys(), *branched, *_ALWAYS_OFFERED}
        _require_inputs(function, f"estimator '{name}'", offered, ESTIMATOR_INPUTS)
        phases.add_advantages(batch)
    except CannotTry as reason:
        logger.info("estimator '%s' is not tried: %s", name, reason)
    # Whatever a user's function does.
    except (Exception, SystemExit) as error:
        if _reads_unknown_column(function, error):
            logger.info(
                "estimator '%s' is not tried: it reads %s, which rows may have in the run",
                name,
                error,
            )
            return
        yield _sentence(error, function, f"estimator '{name}'")


# An estimator may take these beside fields of the batch (training/advantage.py).
_ALWAYS_OFFERED = (
    "token_level_rewards",
    "gamma",
    "lam",
    "num_repeat",
    "config",
    "norm_adv_by_std_in_grpo",
    "state",
    "batch",
    "non_tensor_batch",
    "index",
    "episode_id",
    "role",
    "anchors",
    "whiten",
)


def _require_inputs(
    function: Callable[..., Any], what: str, offered: set[str], listed: tuple[str, ...]
) -> None:
    """Requires that the run gives each argument that a function cannot do without.

    Args:
        listed: inputs that there are; one that is listed and never made here is an edit's own.
    Raises:
        ValueError: nothing gives it. CannotTry: an edit may.
    """
    for parameter in inspect.signature(function).parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        name = parameter.name
        if not by_name or parameter.default is not parameter.empty or name in offered:
            continue
        if name in GIVEN_BY:
            raise ValueError(
                f"{what} takes {name}, which nothing gives in this run: {GIVEN_BY[name]}; or give "
                "the parameter a default"
            )
        if name in listed:
            raise CannotTry(f"nothing makes {name} up")
        raise ValueError(
            f"{what} takes {name}, which nothing gives; there are: "
            f"{', '.join(dict.fromkeys([*listed, *sorted(offered)]))}; give the parameter a default"
        )


def _reads_unknown_column(function: Callable[..., Any], error: BaseException) -> bool:
    """Checks whether an estimator looked for a column by a name that the made-up rows lack."""
    code = code_of(function)
    frames = traceback.extract_tb(error.__traceback__)
    if code is None or all(frame.filename != code.co_filename for frame in frames):
        return False
    parameters = inspect.signature(function).parameters
    reads_columns = any(name in parameters for name in READS_COLUMNS)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return isinstance(error, KeyError) and (reads_columns or takes_all)


# The loss


def _try_loss(config: PPOConfig, batch: DataProto) -> Iterator[str]:
    """Computes the loss of a micro-batch and its gradient; yields what keeps it from a step."""
    name = config.loss_mode
    function = policy_loss_formula(name) or get_policy_loss_fn(name)
    actor = _TriedActor(config, batch)
    counts = global_counts(batch.batch["response_mask"])
    if "observation_mask" in batch.batch:
        batch.meta_info["observation_tokens"] = int(batch.batch["observation_mask"].sum())
    try:
        with seeded_draws(0):
            actor.micro_loss(batch, None, counts)  # type: ignore[arg-type]
    except CannotTry as reason:
        logger.info("policy loss '%s' is not tried: %s", name, reason)
    # Whatever a user's function does.
    except (Exception, SystemExit) as error:
        if _reads_own_field(error):
            logger.info("policy loss '%s' is not tried: nothing makes %s up", name, error)
            return
        yield _sentence(error, function, f"policy loss '{name}'")


def _reads_own_field(error: BaseException) -> bool:
    """Tells whether a loss lacks a field that an edit lists, and may make before the advantages."""
    if not isinstance(error, KeyError) or not error.args:
        return False
    name = error.args[0]
    return name in (*POLICY_LOSS_FIELDS, *VALUE_LOSS_FIELDS) and name not in FIELDS


class _TriedActor(DataParallelPPOActor):
    """Computes the losses of an update without a model: its outputs are made up.

    Args:
        batch: the micro-batch, as an update is given it.
    """

    def __init__(self, config: PPOConfig, batch: DataProto) -> None:
        # Not super().__init__, which builds on a model.
        self.config = config.actor_rollout_ref.actor
        self.correction = config.algorithm.rollout_correction
        self.observation_loss_coef = config.agent.observation_loss_coef
        self.critic_config = config.resolved_critic
        # Ranks of Ray's have devices of their own.
        device = torch.device("cpu")
        if not config.trainer.use_ray:
            device = find_device(config.trainer.device)
        self.settings = ForwardSettings(device=device)
        self.name_of_loss = config.loss_mode
        mask = batch.batch["response_mask"].to(device)
        generator = torch.Generator().manual_seed(1)
        drawn = -1 - 0.1 * torch.rand(mask.shape, generator=generator)
        # As a model gives them: what gradients reach is not a leaf.
        self.sampled = drawn.to(device).requires_grad_()
        self.outputs = [self.sampled * mask, -self.sampled * mask]
        if config.critic.share_backbone:
            self.outputs.append(0.5 * self.sampled * mask)

    def micro_forward(self, micro: DataProto, inputs: Any, *arguments: Any) -> list[Tensor]:
        """Returns made-up log-probs, entropies and, where the policy has them, values: (B, R)."""
        return self.outputs

    def _policy_loss(self, fields: LossFields, log_prob: Tensor, counts: Any) -> Loss:
        """Computes the policy loss, and requires that the policy can learn from it."""
        what = f"policy loss '{self.name_of_loss}'"
        if policy_loss_formula(self.name_of_loss) is None:
            function = get_policy_loss_fn(self.name_of_loss)
            offered = {*fields, *_OFFERED_TO_LOSSES}
            _require_inputs(function, what, offered, POLICY_LOSS_FIELDS)
        loss, metrics = super()._policy_loss(fields, log_prob, counts)
        _check_loss(loss, log_prob, what)
        _check_metrics(metrics, what)
        return loss, metrics


_OFFERED_TO_LOSSES = (
    "old_log_prob",
    "rollout_log_prob",
    "log_prob",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)


def _check_loss(loss: Any, log_prob: Tensor, what: str) -> None:
    """Raises ValueError where a loss is no finite number that has a gradient by the log-probs."""
    if not isinstance(loss, Tensor) or loss.dim():
        size = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise ValueError(
            f"{what} returned {size} for the loss; allowed: a tensor without dimensions, as "
            "agg_loss returns it"
        )
    if not loss.isfinite():
        raise ValueError(f"{what} returned {loss.item()} for the loss; allowed: a finite number")
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, log_prob, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"{what} returned a loss without a gradient by log_prob, so that nothing would be "
            "learnt: something on the way is detached (.detach(), .item(), torch.no_grad()), or "
            "log_prob is not read"
        )
    if not gradient.isfinite().all():
        raise ValueError(f"{what} has a gradient that is not finite")
    if not gradient.any():
        logger.warning("%s has the gradient 0 on made-up numbers: would it learn anything?", what)


def _check_metrics(metrics: Mapping[str, Any], what: str) -> None:
    """Raises ValueError where a metric, by now a tensor, has several numbers."""
    for name, value in metrics.items():
        if value.numel() != 1:
            raise ValueError(
                f"{what} returned a tensor of shape {tuple(value.shape)} for the metric {name!r}; "
                "allowed: a number, or a tensor of one"
            )
        if not value.isfinite().all():
            logger.warning("%s: the metric %r is not finite on made-up numbers", what, name)


def _sentence(error: BaseException, function: Callable[..., Any], what: str) -> str:
    """Tells what a function did, and where it stands; or who else raised, and where."""
    code = code_of(function)
    text = raised(error, function)
    of_its_own = code is not None and code.co_filename in text
    if isinstance(error, ValueError | KeyError) and not of_its_own:
        # A sentence of this project's.
        text = " ".join(str(error.args[0] if error.args else error).split())
    where = located(function, getattr(function, "__name__", what))
    reader = _reader(error)
    if isinstance(error, KeyError) and not of_its_own and reader is not None:
        where = f"{reader.name} ({reader.filename}:{reader.lineno})"
        text = f"{what}: {_missing(text)}"
    text = text if text.startswith(what) else f"{what}: {text}"
    return f"{where}: {text}; seen before the first step, on made-up numbers"


def _reader(error: BaseException) -> traceback.FrameSummary | None:
    """Finds the place that looked for what is not there: the last one of no library.

    None where a function was found to need something: that is its own, whoever says so.
    """
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        is_installed = "site-packages" in file.parts or file.is_relative_to(STANDARD_LIBRARY)
        if not is_installed and file.parent != BATCH_CODE:
            frames.append(frame)
    is_requirement = " needs " in str(error)
    if not frames or is_requirement or frames[-1].filename == __file__:
        return None
    return frames[-1]


def _missing(text: str) -> str:
    """Says that a field is missing, and how it would reach a loss; sentences stay as they are."""
    if not text.isidentifier():
        return text
    return (
        f"there is no {text!r}; losses see the fields that a phase makes (training/step_phases.py) "
        "and POLICY_LOSS_FIELDS lists (workers/model/loss_fields.py)"
    )
