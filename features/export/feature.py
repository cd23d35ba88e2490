"""Writes a checkpoint's model as a Hugging Face folder: python -m features.export.export."""

from training.features import Feature

FEATURE = Feature(
    model_writer="features.export.exported_model:write_model",
    moved_modules={
        "training.run.export": "features.export.export",
        "training.run.exported_model": "features.export.exported_model",
        "training.run.model_card": "features.export.model_card",
    },
)
