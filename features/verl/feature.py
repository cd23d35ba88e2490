"""Names, forms and keys of verl, for code and launch scripts that were written for it."""

from training.features import Feature

FEATURE = Feature(
    translator="features.verl.translator:VerlKeys",
    import_advice="features.verl.verl_modules:verl_import_problem",
    moved_modules={
        "contrib.verl": "features.verl",
        "data.verl_modules": "features.verl.verl_modules",
        "training.config.verl_keys": "features.verl.verl_keys",
        "training.config.verl_runs": "features.verl.verl_runs",
    },
)
