"""Holds the settings of rewards, advantages and losses, as settings.py holds the others; needs and plans of a batch.

Invariant: it knows names only, so that a config is judged without torch. `register_adv_est` enters a user's own.
"""

from dataclasses import field, replace
from typing import Any, Literal, Self

from data.texts import say, table
from training.config import section as of

Dtype = Literal["bfloat16", "float16", "float32"]
PlainKL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLKind = Literal[PlainKL, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class ScoringModelConfig(of.Section):
    """The reward model's weights: a sequence classification model with one output."""

    path: of.InputPath | None = None  #: model folder or hub name; needed with reward_model.enable
    dtype: Dtype = "bfloat16"  #: autocast compute type
    trust_remote_code: bool = False  #: run Python code that comes with the model
    override_config: dict[str, Any] = field(default_factory=dict)  #: entries of the model's config.json to replace
    #: the policy's tokenizer, where this model has another: texts are told anew in its own chat template; null = same
    input_tokenizer: of.InputPath | None = None


class OverlongBufferConfig(of.Section):
    """DAPO's penalty of long responses, rising from 0 to penalty_factor over the last `len` tokens."""

    enable: bool = False  #: penalise
    len: of.NonNegativeInt = 0  #: tokens before data.max_response_length in which the penalty rises
    penalty_factor: of.NonNegativeFloat = 1.0  #: reward that is taken at the full length
    log: bool = False  #: give overlong and overlong_reward as further values


class RewardModelConfig(of.Section):
    """Who turns a response into a reward."""

    enable: bool = False  #: score with a reward model; what a reward function or an environment gives is added
    model: ScoringModelConfig = ScoringModelConfig()
    micro_batch_size_per_gpu: of.PositiveInt = 8  #: rows per forward of the reward model on a rank
    max_length: of.PositiveInt | None = None  #: tokens that it reads of a row, the last ones; null = all
    #: naive = row by row, batch = all at once, prime = in processes, dapo = overlong_buffer, custom = an environment
    reward_manager: str = "naive"
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    reward_kwargs: dict[str, Any] = field(default_factory=dict)  #: passed to the reward manager
    launch_reward_fn_async: bool = False  #: score while old log-probs and values are computed


class CustomRewardFunctionConfig(of.Section):
    """A scoring function of your own: (data_source, solution_str, ground_truth, extra_info) -> float or dict."""

    path: of.InputPath | None = None  #: Python file; null = the built-in rules by data source
    name: str = "compute_score"  #: name of the function in that file
    reward_kwargs: dict[str, Any] = field(default_factory=dict)  #: further keyword arguments for it


class PolicyLossChoice(of.Section):
    """Which policy loss."""

    loss_mode: str = "vanilla"  #: name registered with register_policy_loss; docs/algorithms.md lists them
    clip_cov_ratio: of.PositiveFraction = 0.0002  #: clip_cov: share of tokens whose gradient is stopped
    clip_cov_lb: float = 1.0  #: clip_cov: they are drawn among those of a covariance above it
    clip_cov_ub: float = 5.0  #: clip_cov: and below it
    kl_cov_ratio: of.PositiveFraction = 0.0002  #: kl_cov: share of tokens that are held near the old policy
    ppo_kl_coef: of.NonNegativeFloat = 0.1  #: kl_cov: weight of that
    dro_beta: of.PositiveFloat | None = None  #: dro: weight of the square; needed there
    custom_kwargs: dict[str, Any] = field(default_factory=dict)  #: settings of a loss of your own


class KLControlConfig(of.Section):
    """The weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"  #: adaptive = steered towards target_kl
    kl_coef: of.NonNegativeFloat = 0.001  #: weight, or first weight
    horizon: of.PositiveInt = 10000  #: adaptive: rows over which the weight follows
    target_kl: of.PositiveFloat = 0.1  #: adaptive: nats per token to hold


class FilterGroupsConfig(of.Section):
    """DAPO's dynamic sampling: groups of equal rewards give way to others."""

    enable: bool = False  #: draw further groups until a step's all have different rewards within themselves
    metric: str = "seq_reward"  #: what must differ: seq_reward, or a number that the reward function returns beside it
    #: batches to draw for a step at most; then it makes do with what there is; 0 = no limit
    max_num_gen_batches: of.NonNegativeInt = 10


class RolloutCorrectionConfig(of.Section):
    """What is done about log-probs in which engine and trainer differ."""

    #: weigh tokens with trainer/engine; null = not, but by token where trainer.async_level is above 0; off = not there
    rollout_is: Literal["token", "sequence", "off"] | None = None
    rollout_is_threshold: str = "2.0"  #: UPPER truncates weights; LOWER_UPPER makes those outside 0 (IcePop)
    rollout_is_batch_normalize: bool = False  #: divide weights by their mean
    #: leave out by token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3, or several: A,B
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None  #: UPPER; for k1 of the ratio, LOWER_UPPER or UPPER; or one for each: X,Y
    rollout_token_veto_threshold: of.PositiveFloat | None = None  #: leave a row out where a token's ratio is below it
    bypass_mode: bool = False  #: take the engine's log-probs for the old ones: no pass for those
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  #: of bypass_mode; reinforce weighs with rollout_is

    @property
    def corrects(self) -> bool:
        """Says whether tokens are weighed or left out."""
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))

    @property
    def weighs_alone(self) -> bool:
        """Says whether tokens get weights that need no other row's: a step's one update can then take them itself."""
        others = self.rollout_is_batch_normalize, self.rollout_rs, self.rollout_token_veto_threshold, self.bypass_mode
        return bool(self.rollout_is) and not any(others)


class PFPPOConfig(of.Section):
    """How often a response is trained on, by its score (policy filtration)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"  #: |score|^weight_pow; best and worst; best first
    weight_pow: of.NonNegativeFloat = 2.0  #: that power


class AlgorithmConfig(of.Section):
    """From rewards to advantages."""

    adv_estimator: str = "gae"  #: name registered with register_adv_est; docs/algorithms.md lists them
    gamma: of.Fraction = 1.0  #: discount per token
    lam: of.Fraction = 1.0  #: GAE's lambda
    turn_gamma: of.Fraction = 1.0  #: discount per turn, of turn_gae, turn_return and gigpo
    turn_lam: of.Fraction = 1.0  #: GAE's lambda per turn, of turn_gae
    norm_adv_by_std_in_grpo: bool = True  #: divide by the group's standard deviation; false = Dr.GRPO
    gigpo_step_weight: of.NonNegativeFloat = 1.0  #: gigpo: weight of the comparison among turns of one state
    gdpo_reward_keys: tuple[str, ...] = ()  #: gdpo: numbers that the reward function gives, each normalised by itself
    gdpo_reward_weights: tuple[float, ...] = ()  #: gdpo: weight of each; empty = 1
    distillation_coef: of.NonNegativeFloat = 1.0  #: on_policy_distillation: weight of the KL to ref.model.path
    distillation_task: str | None = None  #: on_policy_distillation: estimator of the task's part; null = none
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    use_pf_ppo: bool = False  #: draw the responses to train on anew, by their scores
    pf_ppo: PFPPOConfig = PFPPOConfig()
    use_kl_in_reward: bool = False  #: subtract the KL to the reference policy from each token's reward
    kl_penalty: KLKind = "kl"  #: its estimator
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    custom_kwargs: dict[str, Any] = field(default_factory=dict)  #: settings of an estimator of your own


# What estimators may ask for beside rewards and mask, and what each asks for.
_TABLE = table(__file__)
OFFERED: tuple[str, ...] = tuple(_TABLE["offered"])
OF_ONE_GROUP, OF_TOKENS = list[str](_TABLE["of_one_group"]), list[str](_TABLE["of_tokens"])
ESTIMATOR_NEEDS: dict[str, tuple[str, ...]] = {name: tuple(needs) for name, needs in _TABLE["needs"].items()}


def estimator_needs(name: str) -> tuple[str, ...]:
    """Lists what the estimator reads besides rewards and mask; nothing of one that is not known."""
    return ESTIMATOR_NEEDS.get(name, ())


class MicroBatching(of.Section):
    """Limits a micro-batch on one rank, by a token budget or by a number of rows; exactly one is set."""

    max_token_len: int | None = None
    micro_batch_size: int | None = None

    def halved(self, longest: int) -> Self:
        """Returns half of it: at least the `longest` row's tokens, or one row."""
        tokens, rows = self.max_token_len, self.micro_batch_size
        tokens = tokens and min(tokens, max(tokens // 2, longest))
        return replace(self, max_token_len=tokens, micro_batch_size=rows and max(rows // 2, 1))


def micro_batching(use_dynamic_bsz: bool | None, micro_batch_size: int | None, max_token_len: int) -> MicroBatching:
    """Takes the token budget where `use_dynamic_bsz` says so; None means unless a micro-batch size (rows) is given."""
    if use_dynamic_bsz or (use_dynamic_bsz is None and micro_batch_size is None):
        return MicroBatching(max_token_len=max_token_len)
    return MicroBatching(micro_batch_size=micro_batch_size)


class UpdatePlan(of.Section):
    """Says how one model passes over the rows of its rank: `epochs` times, in `mini_batches` equal parts each."""

    mini_batches: int
    epochs: int = 1
    shuffle: bool = False

    @classmethod
    def of_rows(cls, rows: int, mini_batch_rows: int, epochs: int = 1, shuffle: bool = False) -> Self:
        """Plans mini-batches of so many rows, or all there are. Raises ValueError unless that divides the rows."""
        mini_batch_rows = min(mini_batch_rows, rows)
        if mini_batch_rows < 1 or rows % mini_batch_rows:
            raise ValueError(say("rows_left_over", rows=rows, size=mini_batch_rows))
        return cls(mini_batches=rows // mini_batch_rows, epochs=epochs, shuffle=shuffle)

    @property
    def updates(self) -> int:
        """Counts the optimiser steps; with a single one the policy that is updated is still the one that sampled."""
        return self.epochs * self.mini_batches


class BatchPlan(of.Section):
    """Says how a step of `prompts` prompts is cut over `ranks` data-parallel ranks and into mini-batches.

    `balance` gives the ranks of a part about the same number of tokens; otherwise rows stay in order. The driver
    arranges the rows by the plan, once for both models, so that one of the two sizes must divide the other, and hands
    it to the workers, which cut what reaches them into as many equal parts. With 12 prompts, rollout.n=2, mini-batches
    of 6 prompts for the actor and of 3 for the critic, and 2 ranks, a part is 3 prompts, that is 6 rows, of which 3 are
    on each rank:

        parts of the batch     |  p0 p1 p2  |  p3 p4 p5  |  p6 p7 p8  |  p9 p10 p11 |
        critic: 4 mini-batches |     0      |     1      |     2      |      3      |
        actor:  2 mini-batches |            0            |            1             |
    """

    prompts: int
    ranks: int
    balance: bool
    actor: UpdatePlan
    critic: UpdatePlan

    @property
    def parts(self) -> int:
        """Counts the smallest mini-batches of a step; each larger one is several of them."""
        return max(self.actor.mini_batches, self.critic.mini_batches)
