"""Holds every setting of a run in frozen dataclasses, which are the only place of defaults, bounds and documentation.

Names and meanings are verl's. Batch sizes count prompts, before each is repeated `rollout.n` times, over all ranks;
names that end in `_per_gpu` count rows or tokens on one rank. The type of a field bounds its value. The text after `#:`
documents it: `--help` and configs/ppo_trainer.yaml show that text, and the first line of a section's docstring.
A config never changes after loading; what follows from several fields is a property here, derived in one place.
"""

import importlib.util
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple, Self

from custom.adapters.base import LIBRARIES, library_of
from training.config import algorithm_settings as algorithms
from training.config import section as of
from training.config.algorithm_settings import BatchPlan, MicroBatching, UpdatePlan, estimator_needs, micro_batching


class EnvironmentChoice(of.Section):
    """What the agent acts in. Give `name`, or `path` and `cls`."""

    #: gymnasium:ID, reasoning_gym:NAME, textarena:ID, textworld:NAME, verifiers:NAME or PACKAGE.MODULE:CLASS
    name: str | None = None
    path: of.InputPath | None = None  #: Python file with a class of your own
    cls: str | None = None  #: name of the class in that file
    kwargs: dict[str, Any] = field(default_factory=dict)  #: its settings
    #: where it runs; null = process for libraries that run texts, else thread
    isolation: Literal["thread", "process", "ray"] | None = None
    num_workers: of.PositiveInt | None = None  #: calls (threads) or environments at once; null = no limit
    network: bool | None = None  #: of its process; null = none where a library runs texts
    memory_gb: of.PositiveFloat | None = None  #: GiB that its process may take; null = 4 where a library runs texts
    prompt_template: str | None = None  #: how an adapter words its observations; null = its own
    weight: of.PositiveFloat = 1.0  #: in env_template: its share of the episodes, relative to the others'
    max_turn: of.PositiveInt | None = None  #: in env_template: turns of its episodes; null = agent.max_turn
    max_turn_tokens: of.PositiveInt | None = None  #: in env_template: tokens of a turn; null = agent.max_turn_tokens

    @property
    def is_set(self) -> bool:
        """Says whether an environment is named."""
        return self.name is not None or self.path is not None


# The name of what a program gives as an object, or an agent class of its own brings.
GIVEN = "given"


class EnvironmentHome(NamedTuple):
    """Says where environments live: threads, processes or Ray actors, how many at once, and a process's limits.

    Its fields are settings of all environments together: `env_template`'s entries have none of their own.
    """

    isolation: Literal["thread", "process", "ray"] = "thread"
    num_workers: int | None = None
    network: bool = True
    memory_gb: float | None = None


class AgentConfig(of.Section):
    """Episodes of several turns in an environment, beside the rollout engine."""

    cls: of.CustomClassConfig = of.CustomClassConfig()
    environment: EnvironmentChoice = EnvironmentChoice()
    suite: of.CustomClassConfig = of.CustomClassConfig()
    agent_length: of.PositiveInt | None = None  #: episodes of a step before ×n; null = data.train_batch_size
    val_length: of.NonNegativeInt = 0  #: episodes of a validation, the same every time; 0 = no validation
    max_turn: of.TurnCount = 10  #: turns of an episode
    max_turn_tokens: of.PositiveInt | None = None  #: tokens of a turn; a longer one is closed and played
    include_state: bool = True  #: add get_state_description() to observations that lack it
    max_observation_chars: of.PositiveInt = 20000  #: a longer observation is cut in its middle
    #: calculator, python, environment_step, FILE.py:NAME of a Tool, or verl's tools.yaml
    tools: tuple[of.ToolName, ...] = ()
    parser: Literal["json", "react", "function"] = "function"  #: how tool calls are written in the model's text
    step_timeout_s: of.PositiveFloat | None = 120.0  #: seconds for one call of the environment; null = no deadline
    episode_timeout_s: of.PositiveFloat | None = None  #: seconds for all of an episode's calls; null = no deadline
    on_failure: Literal["zero", "mask", "refill"] = "refill"  #: a crash: reward 0, left out, or played again
    max_refills: of.NonNegativeInt = 3  #: refill: how often one episode is tried again, before it is masked
    max_failure_rate: of.Fraction = 0.5  #: of the attempts of three steps; a run above it stops; 1 = never
    observation_loss_coef: of.NonNegativeFloat = 0.0  #: weight of predicting what the environment says (ECHO)
    overflow_reward: float = 0.0  #: added where an episode is cut by the limit of its tokens
    trial_episodes: of.NonNegativeInt = 4  #: episodes at start-up of each kind: random answers, garbage, quitting, cut
    allow_different_tasks: bool = False  #: let a group's members begin differently; otherwise that stops the run
    tools_unsafe: bool = False  #: let the python tool run where the kernel gives it no walls
    episodes_dir: of.OutputPath | None = None  #: write every episode, for replay, to STEP.jsonl in this folder


CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


class SamplerConfig(of.Section):
    """The order of the training rows, by a class of your own."""

    class_path: of.InputPath | None = None  #: Python file; null = shuffled or sequential by data.shuffle
    class_name: str | None = None  #: name of the torch Sampler in that file


class DataConfig(of.Section):
    """Prompts: where they come from and how they become token ids."""

    train_files: tuple[of.InputPath, ...] = ()  #: parquet, json or jsonl: one file or a list
    val_files: tuple[of.InputPath, ...] = ()  #: the same for validation; empty = no validation
    train_max_samples: of.PositiveOrMinusOne = -1  #: use at most this many training rows; -1 = all
    val_max_samples: of.PositiveOrMinusOne = -1  #: use at most this many validation rows; -1 = all
    prompt_key: str = "prompt"  #: column with the chat messages
    reward_fn_key: str = "data_source"  #: column that chooses the scoring rule
    max_prompt_length: of.PositiveInt = 512  #: tokens; prompts are padded on the left to this length
    max_response_length: of.PositiveInt = 512  #: tokens a response may have
    train_batch_size: of.PositiveInt = 1024  #: prompts per step
    val_batch_size: of.PositiveInt | None = None  #: prompts per validation batch; null = all at once
    shuffle: bool = True  #: shuffle the training rows, anew in every epoch
    seed: of.NonNegativeInt | None = None  #: seed of data order and sampling; null = 1
    validation_shuffle: bool = False  #: shuffle the validation rows
    dataloader_num_workers: of.NonNegativeInt = 8  #: processes that load rows; 0 = in the driver
    filter_overlong_prompts: bool = False  #: drop prompts longer than max_prompt_length at start-up
    filter_overlong_prompts_workers: of.PositiveInt = 1  #: threads that measure them
    truncation: Literal["error", "left", "right", "middle"] = "error"  #: what to do with a longer prompt
    return_raw_chat: bool = False  #: keep the messages in the batch as raw_prompt
    custom_cls: of.CustomClassConfig = of.CustomClassConfig()
    sampler: SamplerConfig = SamplerConfig()
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  #: passed to the tokenizer's chat template

    @property
    def run_seed(self) -> int:
        """Returns the seed in force; a run always has one, so that it can be repeated."""
        return 1 if self.seed is None else self.seed

    @property
    def row_length(self) -> int:
        """Returns the tokens of the longest row: a prompt and its response."""
        return self.max_prompt_length + self.max_response_length


class CriticModelConfig(of.Section):
    """The critic's weights: a language model with a value head."""

    path: of.InputPath | None = None  #: model folder or hub name; null = the actor's
    dtype: algorithms.Dtype = "bfloat16"  #: autocast compute type; master weights stay float32
    enable_gradient_checkpointing: bool = True  #: recompute activations in backward: less memory, more time
    use_remove_padding: bool = True  #: strip the padding from rows before the forward pass
    trust_remote_code: bool = False  #: run Python code that comes with the model
    override_config: dict[str, Any] = field(default_factory=dict)  #: entries of the model's config.json to replace


class ModelConfig(CriticModelConfig):
    """The actor's weights (the reference policy and the rollout start from the same)."""

    # The critic's settings and LoRA's, which is the policy's alone; `path` stands here for its documentation.
    path: of.InputPath | None = None  #: model folder or hub name; required
    lora_rank: of.NonNegativeInt = 0  #: rank of LoRA adapters; 0 = train all weights
    lora_alpha: of.PositiveInt = 16  #: what they compute counts lora_alpha / lora_rank times
    target_modules: tuple[str, ...] = ("all-linear",)  #: layers that have one, by name; all-linear = all but the head


class OptimConfig(of.Section):
    """AdamW and its learning-rate schedule."""

    lr: of.PositiveFloat = 1e-6  #: learning rate after warm-up
    weight_decay: of.NonNegativeFloat = 0.01  #: decoupled weight decay
    betas: of.Betas = (0.9, 0.999)  #: decay of the first and second moment
    lr_warmup_steps: of.NonNegativeOrMinusOne = -1  #: optimiser steps of linear warm-up; -1 = by lr_warmup_steps_ratio
    lr_warmup_steps_ratio: of.Fraction = 0.0  #: warm-up as a part of all steps
    min_lr_ratio: of.Fraction = 0.0  #: final learning rate as a part of lr (cosine, wsd)
    num_cycles: of.PositiveFloat = 0.5  #: cosine waves over the run; 0.5 = down once
    scheduler: Literal["constant", "cosine", "wsd"] = "constant"  #: shape after warm-up; wsd = hold, then decay


class FSDPConfig(of.Section):
    """Sharding of one model over the ranks."""

    param_offload: bool = False  #: keep parameters in CPU memory while unused
    optimizer_offload: bool = False  #: keep optimiser state in CPU memory while unused
    reshard_after_forward: bool = True  #: free gathered parameters after the forward pass


class CheckpointConfig(of.Section):
    """What a checkpoint holds; extra = schedule and random state, hf_model = a Hugging Face folder."""

    save_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")  #: parts to write
    load_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")  #: saved parts to read on resume


class UpdateConfig(of.Section):
    """What the updates of policy and critic have in common."""

    ppo_micro_batch_size_per_gpu: of.PositiveInt | None = None  #: rows per forward/backward on a rank
    use_dynamic_bsz: bool | None = None  #: cut by token budget; null = unless a micro batch size is given
    ppo_max_token_len_per_gpu: of.PositiveInt = 16384  #: that budget: tokens per forward/backward on a rank
    loss_agg_mode: algorithms.LossAggMode = "token-mean"  #: how token losses become one number
    shuffle: bool = False  #: permute the prompt groups before each pass
    grad_clip: of.PositiveFloat = 1.0  #: bound of the gradient's global norm
    use_prefix_grouper: bool = True  #: compute what rows begin with alike once, where it pays

    @property
    def micro_batching(self) -> MicroBatching:
        """Says how a mini-batch of the update, or the critic's value pass, is cut on one rank."""
        return micro_batching(self.use_dynamic_bsz, self.ppo_micro_batch_size_per_gpu, self.ppo_max_token_len_per_gpu)


class ActorConfig(UpdateConfig):
    """The policy update."""

    strategy: Literal["fsdp2", "fsdp"] = "fsdp2"  #: how several ranks share the weights; both mean FSDP2
    ppo_mini_batch_size: of.PositiveInt | None = None  #: prompts per optimiser step, over all ranks; null = whole step
    clip_ratio: of.NonNegativeFloat = 0.2  #: PPO's clip range
    clip_ratio_low: of.Fraction | None = None  #: lower clip range; null = clip_ratio
    clip_ratio_high: of.NonNegativeFloat | None = None  #: upper clip range; null = clip_ratio
    clip_ratio_c: of.AboveOne = 3.0  #: dual clip: bound of the ratio where the advantage is negative
    tau_pos: of.PositiveFloat = 1.0  #: sapo: steepness of the gate where the advantage is positive
    tau_neg: of.PositiveFloat = 1.05  #: sapo: where it is not
    loss_scale_factor: of.PositiveInt | None = None  #: divisor of seq-mean-token-sum-norm; null = the response length
    #: what seq-mean-* counts once: an episode of any number of rows, or each row, as verl does
    loss_agg_counts: Literal["episodes", "rows"] = "episodes"
    entropy_coeff: float = 0.0  #: weight of the entropy bonus
    use_kl_loss: bool = False  #: add the KL to the reference policy to the loss (GRPO's way)
    kl_loss_coef: of.NonNegativeFloat = 0.001  #: weight of that KL
    kl_loss_type: algorithms.KLKind = "low_var_kl"  #: its estimator; + = straight-through gradient of k2
    ppo_epochs: of.PositiveInt = 1  #: passes over a step's batch
    #: consecutive ranks that share each sequence; divides the attention heads
    ulysses_sequence_parallel_size: of.PositiveInt = 1
    policy_loss: algorithms.PolicyLossChoice = algorithms.PolicyLossChoice()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class RefModelConfig(of.Section):
    """The reference policy's own weights: a teacher."""

    path: of.InputPath | None = None  #: model folder or hub name, of the actor's vocabulary; null = the actor's


class RefConfig(of.Section):
    """The frozen reference policy."""

    model: RefModelConfig = RefModelConfig()
    log_prob_micro_batch_size_per_gpu: of.PositiveInt | None = None  #: rows per forward on a rank; null = the actor's
    log_prob_use_dynamic_bsz: bool | None = None  #: cut by token budget; null = unless a micro batch size is given
    log_prob_max_token_len_per_gpu: of.PositiveInt | None = None  #: tokens per forward on a rank; null = the actor's
    fsdp_config: FSDPConfig = FSDPConfig()


class ValKwargs(of.Section):
    """Sampling in validation."""

    temperature: of.NonNegativeFloat = 0.0  #: used when do_sample is true
    n: of.PositiveInt = 1  #: answers per validation prompt
    do_sample: bool = False  #: false = greedy
    top_k: of.PositiveOrMinusOne = -1  #: sample among the k likeliest tokens; -1 = all
    top_p: of.PositiveFraction = 1.0  #: sample among the likeliest tokens of this total probability


class RolloutConfig(of.Section):
    """The generation engine and its sampling."""

    name: Literal["vllm", "sglang", "hf"] = "vllm"  #: engine; hf = plain transformers, slow but needs nothing
    n: of.PositiveInt = 1  #: responses per prompt: the size of a group
    temperature: of.NonNegativeFloat = 1.0  #: of sampling; log-probs are taken at the same temperature
    top_k: of.PositiveOrMinusOne = -1  #: sample among the k likeliest tokens; -1 = all
    top_p: of.PositiveFraction = 1.0  #: sample among the likeliest tokens of this total probability
    dtype: algorithms.Dtype = "bfloat16"  #: the engine's weights
    gpu_memory_utilization: of.PositiveFraction = 0.5  #: part of the GPU's memory the engine may take
    enforce_eager: bool = False  #: do without CUDA graphs
    free_cache_engine: bool = True  #: release the engine's memory during training
    tensor_model_parallel_size: of.PositiveInt = 1  #: ranks that share one engine; divides trainer.n_gpus_per_node
    max_num_batched_tokens: of.PositiveInt = 8192  #: tokens per engine step
    max_num_seqs: of.PositiveInt = 1024  #: sequences the engine runs at once
    response_length: int | None = None  #: tokens; null = data.max_response_length
    max_model_len: of.PositiveInt | None = None  #: longest prompt + response; null = data's two lengths together
    enable_chunked_prefill: bool = True  #: mix parts of long prompts with generation
    enable_prefix_caching: bool = True  #: compute shared prefixes once
    calculate_log_probs: bool = True  #: keep the engine's own log-probs, to watch how they differ from the trainer's
    log_prob_micro_batch_size_per_gpu: of.PositiveInt | None = None  #: rows of an old-log-prob pass; null = the actor's
    log_prob_use_dynamic_bsz: bool | None = None  #: cut by token budget; null = unless a micro batch size is given
    log_prob_max_token_len_per_gpu: of.PositiveInt | None = None  #: tokens per old-log-prob forward; null = the actor's
    lora_as_adapter: bool = False  #: vllm: send LoRA's adapters alone, and generate with them; false = merge them
    ignore_eos: bool = False  #: go on to max_response_length (for timing)
    #: with trainer.async_level: new weights reach running episodes; false = those are finished first
    update_in_flight: bool = True
    val_kwargs: ValKwargs = ValKwargs()
    #: per engine, passed on: engine_kwargs.vllm.KEY=VALUE
    engine_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)


def _log_prob_micro_batching(own: RefConfig | RolloutConfig, actor: ActorConfig) -> MicroBatching:
    """Takes over from the actor what a log-prob pass leaves open."""
    rows, use_dynamic_bsz = own.log_prob_micro_batch_size_per_gpu, own.log_prob_use_dynamic_bsz
    if rows is None and use_dynamic_bsz is None:
        use_dynamic_bsz = actor.use_dynamic_bsz
    tokens = own.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    return micro_batching(use_dynamic_bsz, rows or actor.ppo_micro_batch_size_per_gpu, tokens)


class ActorRolloutRefConfig(of.Section):
    """The policy in its three uses."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()

    @property
    def ref_micro_batching(self) -> MicroBatching:
        """Says how the reference's log-prob pass is cut on one rank."""
        return _log_prob_micro_batching(self.ref, self.actor)

    @property
    def log_prob_micro_batching(self) -> MicroBatching:
        """Says how the actor's old-log-prob pass is cut on one rank."""
        return _log_prob_micro_batching(self.rollout, self.actor)


class CriticConfig(UpdateConfig):
    """The value function, where the estimator needs one."""

    enable: bool | None = None  #: null = where the estimator reads values
    #: values come from a head on the actor's transformer, one pass and one update for both; false = a model of its own
    share_backbone: bool = False
    value_loss_coef: of.NonNegativeFloat = 0.5  #: weight of the values' loss beside the policy's, with share_backbone
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    ppo_mini_batch_size: of.PositiveInt | None = None  #: prompts per optimiser step, over all ranks; null = the actor's
    ppo_max_token_len_per_gpu: of.PositiveInt = 32768  #: that budget: tokens per forward/backward on a rank
    ppo_epochs: of.PositiveInt | None = None  #: passes over a step's batch; null = the actor's
    cliprange_value: of.PositiveFloat = 0.5  #: how far a value may move from its old one before the loss is clipped
    #: consecutive ranks that share each sequence; null = the actor's
    ulysses_sequence_parallel_size: of.PositiveInt | None = None
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class TrainerConfig(of.Section):
    """The run: how long, where, what is written."""

    total_epochs: of.PositiveInt = 30  #: passes over the training rows
    total_training_steps: of.PositiveInt | None = None  #: steps; null = total_epochs passes
    project_name: str = "ppo_core"  #: groups runs in trackers and folders
    experiment_name: str = "default"  #: name of this run
    logger: tuple[Literal["console", "file", "tensorboard", "wandb"], ...] = ("console", "file")  #: where metrics go
    nnodes: of.PositiveInt = 1  #: machines
    n_gpus_per_node: of.PositiveInt = 1  #: ranks per machine; on a CPU machine too
    rollout_n_gpus: of.NonNegativeInt = 0  #: ranks, beside those, of which each has an engine; 0 = they share theirs
    #: with rollout_n_gpus: how many updates old a sampled token may be; above 0 generation goes on while training runs
    async_level: of.NonNegativeInt = 0
    #: train on groups whose episodes have ended while others play; deterministic=true waits (docs/asynchronous.md)
    train_finished_groups: bool = False
    device: Literal["cuda", "cpu"] | None = None  #: null = cuda where there is one
    balance_batch: bool = True  #: give each rank about the same number of tokens
    #: what an alarm does (docs/alarms.md): one line in the log | ends the run too | nothing is watched
    alarms: Literal["warn", "stop", "off"] = "warn"
    #: steps between checkpoints; null = every ten minutes and at the end, the last two are kept; -1 = on Ctrl-C alone
    save_freq: of.PositiveOrMinusOne | None = None
    test_freq: of.PositiveOrMinusOne = -1  #: steps between validations; -1 = only before training and at the end
    val_before_train: bool = True  #: validate before the first step
    val_only: bool = False  #: validate and stop
    critic_warmup: of.NonNegativeInt = 0  #: steps in which only the critic learns
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"  #: auto = from the latest checkpoint, if any
    resume_from_path: of.InputPath | None = None  #: a global_step_N folder, for resume_mode=resume_path
    resume_with_changes: bool = False  #: resume though the checkpoint lacks a part, as a critic, which starts anew
    default_local_dir: of.OutputPath | None = None  #: folder of the run; null = checkpoints/PROJECT/EXPERIMENT
    max_actor_ckpt_to_keep: of.PositiveInt | None = None  #: older ones are deleted; null = keep all of save_freq's
    max_critic_ckpt_to_keep: of.PositiveInt | None = None  #: older ones are deleted; null = keep all of save_freq's
    rollout_data_dir: of.OutputPath | None = None  #: write every step's prompts, responses and scores here
    validation_data_dir: of.OutputPath | None = None  #: write every validation's here
    log_val_generations: of.NonNegativeInt = 0  #: validation answers to show in the log
    launcher: Literal["local", "ray"] | None = None  #: local = one process; null = ray for more than one rank
    #: seconds in which nothing at all moves after which a run ends (docs/failures.md); null = waits for ever
    stall_timeout_s: of.PositiveFloat | None = 3600.0
    max_restarts: of.NonNegativeInt = 0  #: how often a run that fails is started again, from its last checkpoint
    deterministic: bool = False  #: turns in lockstep, deterministic operations, exact resume; somewhat slower

    @property
    def num_ranks(self) -> int:
        """Counts the processes over all machines."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def all_ranks(self) -> int:
        """Counts those of the engines too, where they have their own."""
        return self.num_ranks + self.rollout_n_gpus

    @property
    def trackers(self) -> tuple[str, ...]:
        """Lists the loggers whose package is there."""
        return tuple(name for name in self.logger if name in ("console", "file") or importlib.util.find_spec(name))

    @property
    def use_ray(self) -> bool:
        """Says whether Ray places the workers; otherwise they live in this process."""
        return self.launcher == "ray" or (self.launcher is None and self.all_ranks > 1)

    @property
    def run_dir(self) -> str:
        """Returns the folder of checkpoints, metrics and the saved config."""
        return self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"


class RayKwargs(of.Section):
    """Settings for Ray itself."""

    ray_init: dict[str, Any] = field(default_factory=dict)  #: arguments of ray.init: num_cpus, address, ...


class PPOConfig(of.Section):
    """Holds the settings of one run."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: algorithms.RewardModelConfig = algorithms.RewardModelConfig()
    custom_reward_function: algorithms.CustomRewardFunctionConfig = algorithms.CustomRewardFunctionConfig()
    algorithm: algorithms.AlgorithmConfig = algorithms.AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    agent: AgentConfig = AgentConfig()
    env_template: tuple[EnvironmentChoice, ...] = ()  #: environments as in agent.environment, in turn over the agents
    custom_algorithm: of.InputPath | None = None  #: Python file that registers estimators and losses of your own
    ray_kwargs: RayKwargs = RayKwargs()

    @property
    def need_values(self) -> bool:
        """Returns critic.enable where it is set, else whether the estimator reads values."""
        return "values" in self.estimator_needs if self.critic.enable is None else self.critic.enable

    @property
    def need_critic(self) -> bool:
        """Says whether a model of its own gives the values."""
        return self.need_values and not self.critic.share_backbone

    @property
    def estimator_needs(self) -> tuple[str, ...]:
        """Lists what the estimator reads beside rewards and mask."""
        return estimator_needs(self.algorithm.adv_estimator)

    @property
    def need_reference(self) -> bool:
        """Says whether log-probs of the reference policy are read: in the loss, the reward or the estimator."""
        used = self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return used or "ref_log_prob" in self.estimator_needs

    @property
    def loss_mode(self) -> str:
        """Names the policy loss in force."""
        bypass = self.algorithm.rollout_correction.bypass_mode
        return "bypass_mode" if bypass else self.actor_rollout_ref.actor.policy_loss.loss_mode

    @property
    def environments(self) -> tuple[EnvironmentChoice, ...]:
        """Lists what the agents act in, in turn; empty where training is on prompts."""
        if self.env_template:
            return self.env_template
        # An agent class of one's own may bring its environment.
        acts = self.agent.environment.is_set or self.agent.cls.path
        return (self.agent.environment,) if acts else ()

    @property
    def environment_home(self) -> EnvironmentHome:
        """Says where environments live; what the config leaves open follows from their libraries."""
        given = self.agent.environment
        libraries = [LIBRARIES[name] for item in self.environments if (name := library_of(item.name))]
        guarded = [library for library in libraries if library.own_process]
        network = given.network if given.network is not None else all(library.network for library in guarded)
        memory = given.memory_gb or (4.0 if guarded else None)
        return EnvironmentHome(
            given.isolation or ("process" if guarded else "thread"), given.num_workers, network, memory
        )

    @property
    def prompts_per_step(self) -> int:
        """Counts the prompts, or episodes, of a step before each is repeated."""
        return (self.agent.agent_length if self.environments else None) or self.data.train_batch_size

    @property
    def data_parallel_size(self) -> int:
        """Counts the groups of ranks that train on rows of their own; the ranks of a group share each sequence."""
        return self.trainer.num_ranks // max(self.actor_rollout_ref.actor.ulysses_sequence_parallel_size, 1)

    @property
    def batch_plan(self) -> BatchPlan:
        """Plans how a step's batch is cut; without a critic its part follows the actor's."""
        prompts, ranks, actor = self.prompts_per_step, self.data_parallel_size, self.actor_rollout_ref.actor
        plans = {}
        for name, own in {"actor": actor, "critic": self.resolved_critic if self.need_critic else actor}.items():
            size = own.ppo_mini_batch_size or prompts
            plans[name] = UpdatePlan.of_rows(prompts, size, own.ppo_epochs or 1, own.shuffle)
        return BatchPlan(prompts=prompts, ranks=ranks, balance=self.trainer.balance_batch, **plans)

    @property
    def max_model_len(self) -> int:
        """Returns the tokens of the longest row that the rollout engine must hold."""
        return self.actor_rollout_ref.rollout.max_model_len or self.data.row_length

    @property
    def resolved_rollout(self) -> RolloutConfig:
        """Returns the rollout's section with what it takes over from the data section filled in."""
        rollout = self.actor_rollout_ref.rollout
        length = rollout.response_length or self.data.max_response_length
        sleeps = rollout.free_cache_engine and not self.trainer.rollout_n_gpus
        own = {"response_length": length, "max_model_len": self.max_model_len, "free_cache_engine": sleeps}
        return RolloutConfig(**(vars(rollout) | own))

    @property
    def with_correction(self) -> Self:
        """Is the config with `rollout_is` decided: by default what older weights sampled is weighed by token."""
        given = self.algorithm.rollout_correction
        by_default = self.trainer.async_level and not (given.corrects or given.bypass_mode)
        if given.rollout_is != "off" and not by_default:
            return self
        correction = replace(given, rollout_is="token" if by_default else None)
        return replace(self, algorithm=replace(self.algorithm, rollout_correction=correction))

    @property
    def resolved_critic(self) -> CriticConfig:
        """Returns the critic's section with what it takes over from the actor filled in."""
        policy, critic = self.actor_rollout_ref, self.critic
        model = replace(critic.model, path=critic.model.path or policy.model.path)
        left_open = ("ppo_mini_batch_size", "ppo_epochs", "ulysses_sequence_parallel_size")
        return replace(critic, model=model, **{name: critic[name] or policy.actor[name] for name in left_open})
