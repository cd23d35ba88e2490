"""The teacher on a rank: the policy, an average of its weights, or another model.

It answers two questions about rows: which words the policy finds likeliest at each place
(`POLICY_WORDS`), and how likely the teacher finds the sampled tokens, and words, behind prompts of
its own (`TEACHER`). Invariant: it is read without a gradient, and leaves the policy as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from data.protocol import DataProto
from features.teacher.average import WeightAverage
from features.teacher.settings import EMA, POLICY, TeacherSettings
from training.config import PPOConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.builder import require_same_vocabulary
from workers.model.companion import Companion
from workers.model.loss_fields import CANDIDATES
from workers.ranks import offload

# The companion's name.
NAME = "teacher"
# The meta_info that says what is asked, and how many of each place's likeliest words are wanted.
QUESTION = "teacher_question"
TOP = "teacher_top"
POLICY_WORDS = "policy_words"
TEACHER = "teacher"
# What comes back, and reaches the loss: (B, R), (B, R, K) and (B, R, K).
LOG_PROBS = "teacher_log_probs"
WORDS = "teacher_words"
WORD_LOG_PROBS = "teacher_word_log_probs"


def open_companion(config: PPOConfig, worker: Any) -> TeacherWeights | None:
    """Opens the teacher beside a worker's actor; None where the config has none."""
    settings = config.section(TeacherSettings)
    return None if settings.model is None else TeacherWeights(settings, worker)


class TeacherWeights(Companion):
    """Reads the teacher.

    Args:
        worker: `ActorRolloutRefWorker`, whose actor is built.

    Raises:
        ValueError: another model has another vocabulary than the policy.
    """

    name = NAME

    def __init__(self, settings: TeacherSettings, worker: Any) -> None:
        self.worker = worker
        self.average: WeightAverage | None = None
        self.reader: DataParallelPPOActor = worker.actor
        self.is_other_model = settings.model not in (POLICY, EMA)
        if settings.model == EMA:
            self.average = WeightAverage(worker.module, settings.ema_decay)
        elif self.is_other_model:
            self.reader = self._load(str(settings.model))

    def _load(self, path: str) -> DataParallelPPOActor:
        """Loads another model as the teacher; it waits where the reference would."""
        worker = self.worker
        spec = replace(worker.spec, path=path)
        require_same_vocabulary(worker.spec, spec, key="teacher.model")
        self.fsdp = worker.policy.ref.fsdp_config
        model, settings = worker.load_policy(self.fsdp, spec, trainable=False)
        offload.offload(model, None, self.fsdp)
        return DataParallelPPOActor(worker.policy.actor, model, forward=settings)

    def begin(self) -> None:
        """Begins the average with the policy's weights."""
        if self.average is not None:
            self.average.begin()

    def updated(self) -> None:
        """Takes the policy's new weights into the average."""
        if self.average is not None:
            self.average.update()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the average, for checkpoints."""
        return {} if self.average is None else self.average.averages

    def read(self, data: DataProto) -> DataProto:
        """Answers a question about rows; see the file's docstring."""
        top = int(data.meta_info.get(TOP, 0))
        if data.meta_info[QUESTION] == POLICY_WORDS:
            return self._read(self.worker.actor, data, top)
        with self._teacher_in_place():
            return self._read(self.reader, data, top)

    def _read(self, reader: DataParallelPPOActor, data: DataProto, top: int) -> DataProto:
        """Reads log-probs of sampled tokens, and of the rows' words or of the likeliest ones."""
        has_words = WORDS in data.batch
        if has_words:
            data = replace(data, meta_info=data.meta_info | {CANDIDATES: (WORDS,)})
        limits = self.worker.policy.log_prob_micro_batching
        outputs = reader.read(data, "the teacher", limits, "none", top)
        fields = {LOG_PROBS: outputs[0]}
        if has_words:
            fields[WORD_LOG_PROBS] = outputs[-1]
        elif top:
            fields[WORD_LOG_PROBS], fields[WORDS] = outputs[-2], outputs[-1].int()
        return DataProto.from_dict(tensors=fields)

    @contextmanager
    def _teacher_in_place(self) -> Iterator[None]:
        """Makes `reader` the teacher for the block."""
        held: AbstractContextManager[None] = nullcontext()
        if self.average is not None:
            # A checkpoint may be copying weights and average.
            self.worker.writer.wait_until_copied()
            held = self.average.in_place()
        elif self.is_other_model:
            held = offload.on_device(self.reader.actor_module, None, self.worker.device, self.fsdp)
        with held:
            yield
