"""Names of verl that nothing in this project calls, for code that was written for verl.

    config           verl.base_config, verl.trainer.config, verl.workers.config, verl.utils.config
    core_algos       verl.trainer.ppo.core_algos: the rest of training.core_algos, more lenient
    protocol         verl.protocol: functions beside data.protocol
    rollout_corr     verl.trainer.ppo.rollout_corr_helper: beside training.rollout_correction
    reward_manager   verl.workers.reward_manager: the base class of managers
    torch_functional verl.utils.torch_functional: beside training.batch.torch_functional
    sampler          verl.experimental.dataset.sampler
    utils            verl.utils, verl.utils.tokenizer, .model, .py_functional, .groupwise

What a run uses has verl's name where it stands, as `data.protocol.DataProto` and
`custom.tools.verl_tools.BaseTool`. `python scripts/verl_imports.py FILE` says for each import of a
file where its names are; features/verl/README.md lists them.

Invariant: nothing outside imports this folder.
"""
