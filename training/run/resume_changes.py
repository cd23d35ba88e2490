"""Tells why a checkpoint does not fit a run: the settings that changed since it was saved."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.config import PPOConfig
from training.run.checkpoint_folders import CannotResume
from training.run.recorded_config import changes_since
from workers.model.checkpoint_reader import DoesNotFit

# Settings of which the tensors of a checkpoint depend.
OF_OPTIMIZER = r"optim\.(optimizer|optimizer_impl|override_optimizer_config)(\..*)?"
OF_TENSORS = re.compile(
    rf"(actor_rollout_ref|critic)\.((actor\.)?{OF_OPTIMIZER}|model\..*"
    r"|(actor\.)?checkpoint\.(save|load)_contents|share_backbone)"
)
OPTIMIZER_ADVICE = (
    "Set it back, or let the optimizer begin with a state of its own by "
    "trainer.resume_with_changes=true"
)
MODEL_ADVICE = (
    "Set it back; a run with another model begins in another trainer.default_local_dir, from these "
    "weights once features/export has written them as a model's folder"
)


@contextmanager
def refusing_what_does_not_fit(checkpoint: Path, step: int, config: PPOConfig) -> Iterator[None]:
    """Raises CannotResume where the block finds that a part of the checkpoint does not fit.

    Args:
        step: the checkpoint's.
        config: of the run that is to go on from it.
    """
    try:
        yield
    except DoesNotFit as error:
        # As Ray hands a rank's error on, it has its traceback for a text.
        problem = str(getattr(error, "cause", None) or error)
        advice = OPTIMIZER_ADVICE if "another optimizer" in problem else MODEL_ADVICE
        text = f"{checkpoint} does not fit this run: "
        text += f"{_changed(checkpoint, step, config, problem)}. {advice} ({problem})"
        is_missing = "another optimizer" not in problem and "another model" not in problem
        # A part that is missing comes with its own advice.
        raise CannotResume(problem if is_missing else text) from error


def _changed(checkpoint: Path, step: int, config: PPOConfig, problem: str) -> str:
    """Names the settings of the part's tensors that are others than when it was saved."""
    section = "critic." if f"{checkpoint}/critic" in problem else "actor_rollout_ref."
    sections = (section, "critic.share_backbone")
    changes = {
        key: values
        for key, values in changes_since(checkpoint.absolute().parent, step, config).items()
        if OF_TENSORS.fullmatch(key) and key.startswith(sections)
    }
    of_optimizer = {key: changes[key] for key in changes if ".optim." in key}
    if "another optimizer" in problem and of_optimizer:
        changes = of_optimizer
    named = [f"{key} was {old!r}, and is {new!r}" for key, (old, new) in changes.items()]
    return "; ".join(named) or (
        "its model or optimizer is another one, though no setting recorded beside it tells of a "
        "change"
    )
