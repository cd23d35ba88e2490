"""Presets of `algorithm.rollout_correction` by verl's names.

decoupled   with a pass for the old log-probs
bypass      with the engine's in their place: PPO's loss (ppo_clip), or the policy gradient (pg)
token_is, seq_is    weigh tokens, or sequences, up to a threshold; icepop: 0 outside a range
geo_rs, k3_rs       leave out sequences by the mean logarithm of their ratios, or their mean k3
"""

from typing import Any, Self

Threshold = str | float
GEO_RANGE = "0.999_1.001"
MOST_K3 = 0.01


class RolloutPresets:
    """Makes configs of the class that derives from it."""

    @classmethod
    def _preset(
        cls,
        weigh: str | None = None,
        is_threshold: Threshold = 2.0,
        reject: str | None = None,
        rs_threshold: Threshold | None = None,
        **others: Any,
    ) -> Self:
        return cls(  # type: ignore[call-arg]
            rollout_is=weigh,
            rollout_is_threshold=is_threshold,
            rollout_rs=reject,
            rollout_rs_threshold=rs_threshold,
            **others,
        )

    @classmethod
    def disabled(cls) -> Self:
        """Measures, and corrects nothing."""
        return cls._preset()

    # --- With a pass for the old log-probs ---

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> Self:
        """Weighs tokens."""
        return cls._preset("token", threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> Self:
        """Weighs sequences."""
        return cls._preset("sequence", threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Weighs tokens, those outside the range with 0."""
        return cls._preset("token", f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(
        cls,
        is_threshold: float = 2.0,
        rs_threshold: Threshold = "0.5_2.0",
        rs_threshold_lower: float | None = None,
    ) -> Self:
        """Weighs sequences, and leaves out those whose ratio is outside the range."""
        limits = _range(rs_threshold, rs_threshold_lower)
        return cls._preset("sequence", is_threshold, "seq_sum_k1", limits)

    @classmethod
    def decoupled_geo_rs(
        cls,
        rs_threshold: Threshold = GEO_RANGE,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = None,
    ) -> Self:
        """Leaves out sequences by the mean logarithm of their ratios.

        verl 0.6.1 also leaves out, by default, those with a token below 1e-4; later ones do not.
        """
        limits = _range(rs_threshold, rs_threshold_lower)
        return cls._preset(
            reject="seq_mean_k1", rs_threshold=limits, rollout_token_veto_threshold=veto_threshold
        )

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold = GEO_RANGE
    ) -> Self:
        """Does that, and weighs sequences."""
        return cls._preset("sequence", is_threshold, "seq_mean_k1", rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold = GEO_RANGE
    ) -> Self:
        """Does that, and weighs tokens."""
        return cls._preset("token", is_threshold, "seq_mean_k1", rs_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = MOST_K3) -> Self:
        """Leaves out sequences by their mean k3."""
        return cls._preset(reject="seq_mean_k3", rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = MOST_K3
    ) -> Self:
        """Does that, and weighs sequences."""
        return cls._preset("sequence", is_threshold, "seq_mean_k3", rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = MOST_K3
    ) -> Self:
        """Does that, and weighs tokens."""
        return cls._preset("token", is_threshold, "seq_mean_k3", rs_threshold)

    # --- With the engine's log-probs in their place ---

    @classmethod
    def _bypass(cls, loss_type: str, **settings: Any) -> Self:
        return cls._preset(bypass_mode=True, loss_type=loss_type, **settings)

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        """Takes PPO's loss, whose ratio is then to the engine."""
        return cls._bypass("ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold = GEO_RANGE) -> Self:
        """Does that, and leaves out sequences by the mean logarithm of their ratios."""
        return cls._bypass("ppo_clip", reject="seq_mean_k1", rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = MOST_K3) -> Self:
        """Does that, and leaves out sequences by their mean k3."""
        return cls._bypass("ppo_clip", reject="seq_mean_k3", rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> Self:
        """Takes the policy gradient, and weighs sequences."""
        return cls._bypass("reinforce", weigh="sequence", is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Takes the policy gradient, and weighs tokens, those outside the range with 0."""
        limits = f"{threshold_lower}_{threshold}"
        return cls._bypass("reinforce", weigh="token", is_threshold=limits)

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold = GEO_RANGE) -> Self:
        """Takes the policy gradient, and leaves out sequences as `decoupled_geo_rs` does."""
        return cls._bypass("reinforce", reject="seq_mean_k1", rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold = GEO_RANGE
    ) -> Self:
        """Does that, and weighs sequences."""
        return cls._bypass(
            "reinforce",
            weigh="sequence",
            is_threshold=is_threshold,
            reject="seq_mean_k1",
            rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold = GEO_RANGE
    ) -> Self:
        """Does that, and weighs tokens."""
        return cls._bypass(
            "reinforce",
            weigh="token",
            is_threshold=is_threshold,
            reject="seq_mean_k1",
            rs_threshold=rs_threshold,
        )

    # --- Names of verl 0.6.1 ---

    @classmethod
    def ppo_is_bypass(cls, threshold: float = 2.0) -> Self:
        """Takes PPO's loss with the ratio to the engine; token weights are measured alone."""
        return cls._bypass("ppo_clip", weigh="token", is_threshold=threshold)

    @classmethod
    def pg_is(cls, threshold: float = 2.0) -> Self:
        """Takes the policy gradient, and weighs sequences."""
        return cls.bypass_pg_is(threshold)

    @classmethod
    def pg_rs(
        cls,
        rs_threshold: Threshold = 1.001,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 1e-4,
    ) -> Self:
        """Takes the policy gradient, and leaves out sequences as `decoupled_geo_rs` does.

        Those with a token below `veto_threshold` too.
        """
        return cls._bypass(
            "reinforce",
            reject="seq_mean_k1",
            rs_threshold=_range(rs_threshold, rs_threshold_lower),
            rollout_token_veto_threshold=veto_threshold,
        )


def _range(upper: Threshold, lower: float | None) -> Threshold:
    """Joins two bounds into one threshold; one alone is a threshold already."""
    if lower is None:
        return upper
    return f"{lower}_{upper}"
