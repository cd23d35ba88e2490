"""A teacher that may be told more than the policy: teacher.model, teacher.context."""

from features.teacher.settings import TeacherSettings
from training.features import Feature

FEATURE = Feature(
    section=TeacherSettings,
    # The section by which other programs call it.
    moved_keys={"algorithm.teacher": "teacher"},
    checks="features.teacher.checks:config_problems",
    keeper="features.teacher.keeper:open_keeper",
    companion="features.teacher.weights:open_companion",
    step_addition="features.teacher.teaching:open_addition",
    loss_terms="features.teacher.losses:open_loss_terms",
    metrics="metric_names.yaml",
)
