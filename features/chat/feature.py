"""Plays one episode with a person: --chat MODEL."""

from training.features import Feature

FEATURE = Feature(
    modes={"--chat": "features.chat.command:chat_command"},
    model_options=("--chat",),
    usage="--chat MODEL    play one episode with a person (--as environment, policy or watcher)",
    moved_modules={"training.chat": "features.chat"},
)
