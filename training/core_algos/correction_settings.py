"""Holds the settings of rollout correction (rollout_correction.py)."""

from dataclasses import dataclass
from typing import Literal

from training.core_algos.settings import ByName, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionSettings(ByName):
    """Says what is done about log-probs in which engine and trainer differ."""

    #: weigh tokens with trainer/engine; null = not, but by token where trainer.async_level is
    #: above 0; off = not there
    rollout_is: Literal["token", "sequence", "off"] | None = None
    #: UPPER truncates weights; LOWER_UPPER makes those outside 0 (IcePop)
    rollout_is_threshold: str = "2.0"
    rollout_is_batch_normalize: bool = False  #: divide weights by their mean
    #: leave out by token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3, or
    #: several: A,B
    rollout_rs: str | None = None
    #: UPPER; for k1 of the ratio, LOWER_UPPER or UPPER; or one for each: X,Y
    rollout_rs_threshold: str | None = None
    #: leave an episode out where a token's ratio is below it
    rollout_token_veto_threshold: PositiveFloat | None = None
    #: take the engine's log-probs for the old ones: no pass for those
    bypass_mode: bool = False
    #: of bypass_mode; reinforce weighs with rollout_is
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"

    @property
    def corrects(self) -> bool:
        """Returns whether tokens are weighed or left out."""
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))

    @property
    def weighs_alone(self) -> bool:
        """Returns whether tokens get weights that need no other row's, but for their episode's.

        A step's one update can then take them itself.
        """
        needs_other_rows = any(
            (
                self.rollout_is_batch_normalize,
                self.rollout_rs,
                self.rollout_token_veto_threshold,
                self.bypass_mode,
            )
        )
        return bool(self.rollout_is) and not needs_other_rows
