"""Learns given conversations: --sft DATA, and beside a run sft.loss_coef."""

from features.sft.settings import SFTSettings
from training.features import Feature

FEATURE = Feature(
    section=SFTSettings,
    # The key by which other programs call it.
    moved_keys={"actor_rollout_ref.actor.sft_loss_coef": "sft.loss_coef"},
    checks="features.sft.checks:config_problems",
    observer="features.sft.beside:open_observer",
    further_rows="features.sft.beside:open_rows",
    metrics="metric_names.yaml",
    modes={"--sft": "features.sft.command_line:sft_command"},
    usage="--sft DATA   train on conversations, or on selected episodes (features/sft)",
)
