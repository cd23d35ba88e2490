"""Lists the keys of verl that are called otherwise here, mean nothing here, or belong to parts that are not there.

No key on the left is a setting here. Patterns are those of fnmatch, and the first that fits counts.
"""

# Keys of verl that live elsewhere here. A trailing * carries the rest of the key over.
MOVED = {
    "algorithm.clip_ratio": "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "actor_rollout_ref.actor.optim.scheduler",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.scheduler",
    "critic.optim.lr_scheduler_type": "critic.optim.scheduler",
    "critic.optim.warmup_style": "critic.optim.scheduler",
    "critic.model.fsdp_config.*": "critic.fsdp_config.*",
    "critic.fsdp.*": "critic.fsdp_config.*",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "agent.max_turn",
}
# Of these, the old key and the new one are one limit: two different values are an error.
ONE_LIMIT = {"agent.max_turn"}
SEVERAL_TURNS = "actor_rollout_ref.rollout.multi_turn.enable"
# Keys of verl that scripts set and that mean nothing here: accepted, with the reason in the log.
IGNORED = {
    "actor_rollout_ref.hybrid_engine": "actor and rollout always share their devices",
    "*.ppo_micro_batch_size": "sizes over all ranks are deprecated: set ppo_micro_batch_size_per_gpu",
    "*.log_prob_micro_batch_size": "sizes over all ranks are deprecated: set log_prob_micro_batch_size_per_gpu",
    "critic.forward_*": "values are computed with the micro-batches of the update",
    "critic.rollout_n": "the group size is actor_rollout_ref.rollout.n",
    "critic.strategy": "the critic is shared over the ranks as the actor is",
    "critic.model.tokenizer_path": "actor and critic share one tokenizer",
    "actor_rollout_ref.ref.strategy": "the reference is shared over the ranks as the actor is",
    "*.optim.total_training_steps": "the schedule's length follows from trainer.total_training_steps",
    "*.fsdp_config.grad_offload": "gradients are freed after each optimiser step",
    "*.fsdp_config.fsdp_size": "weights are shared over all ranks",
    "*.fsdp_config.forward_prefetch": "FSDP2 prefetches by itself",
    "*.fsdp_config.wrap_policy*": "every transformer layer is one unit",
    "*.fsdp_config.model_dtype": "master weights are float32; model.dtype is the compute type",
    "*.use_shm": "models are read from their folder",
    "*.external_lib": "custom_algorithm and the custom classes take a file",
    "*.model.use_fused_kernels": "log-probs are computed on response positions only",
    "*.model.lora_alpha": "it matters with LoRA only",
    "*.model.target_modules": "it matters with LoRA only",
    "*.use_torch_compile": "the forward pass runs as written",
    "*.entropy_from_logits_with_chunking": "entropy is computed in chunks where logits are large",
    "*.entropy_checkpointing": "entropy is computed in chunks where logits are large",
    SEVERAL_TURNS: "episodes have several turns where agent.environment is set",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "the environment speaks after every turn but the last",
    "actor_rollout_ref.rollout.mode": "the engine lives beside the actor, and episodes go on by themselves",
    "actor_rollout_ref.rollout.multi_turn.format": "agent.parser says how tool calls are written",
    "actor_rollout_ref.rollout.trace.*": "agent.episodes_dir records every episode",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "the reference shares sequences as the actor does",
    "actor_rollout_ref.rollout.over_sample_rate": "every episode that is started is trained on",
    "data.gen_batch_size": "a step generates for as many prompts as it trains on",
    "global_profiler.*": "torch's own profilers can be started around main.py",
    "actor_rollout_ref.rollout.disable_log_stats": "the engine's own statistics stay off",
    "actor_rollout_ref.rollout.load_format": "the engine takes its weights from the actor",
    "actor_rollout_ref.rollout.layered_summon": "weights are sent to the engine one at a time",
    "data.tokenizer": "the tokenizer comes with the model",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code decides for the tokenizer too",
    "data.return_raw_input_ids": "raw prompt ids are always kept",
    "data.return_full_prompt": "raw prompt ids are always kept",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.ray_wait_register_center_timeout": "workers register without a centre",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept until newer ones are complete",
}
# Keys of parts that this project does not have: errors that say so.
UNAVAILABLE = {
    "*.megatron*": "the Megatron backend is not there; use actor_rollout_ref.actor.strategy=fsdp2",
    "*.rollout.multi_turn.*": "name the environment under agent.environment, tools and their parser under agent",
    "actor_rollout_ref.rollout.agent.*": "agent loops of one's own are classes: agent.cls.path and agent.cls.name",
    "reward_model.model.*": "reward models are not there yet; use custom_reward_function.path",
    "reward_model.overlong_buffer*": "overlong penalties are not there yet; give them in your reward function",
    "algorithm.rollout_correction.*": "rollout correction is not there yet",
    "algorithm.*pf_ppo*": "pf_ppo is not there yet",
    "trainer.default_hdfs_dir": "HDFS is not supported; use trainer.default_local_dir",
}
