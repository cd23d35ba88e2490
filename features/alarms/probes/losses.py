"""Whether the losses see the whole batch, and the first update starts where sampling left off."""

from collections.abc import Mapping

from torch import Tensor

from data.protocol import DataProto
from training import core_algos as algos
from workers.model.loss_fields import LossFields
from workers.model.probe import GroupCounts, MicroBatch, MiniBatch, SummingProbe, TrainedModel
from workers.ranks.process_groups import world_size


class LossCounts(SummingProbe):
    """Counts what losses are made of, to be compared with the step's batch.

    MODEL/loss_tokens, and MODEL/loss_targets, the sum of their advantages, of a critic of their
    returns. Beside them MODEL/given_tokens and MODEL/given_targets of the mini-batches that were
    begun, and their number, MODEL/mini_batches: an edit may end an update early. Groups that come
    one by one have none of these three.
    """

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Counts what a mini-batch is given."""
        super().begin(model, mini)
        if mini.rows is None:
            return
        tokens, targets = _tokens_and_targets(mini.rows, model.name)
        self.sums.add(
            {f"{model.name}/given_tokens": tokens, f"{model.name}/given_targets": targets}
        )
        share = model.settings.sequence_ranks / world_size()
        self.sums.add({f"{model.name}/mini_batches": 1.0}, share)

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Counts a micro-batch."""
        model = self.model.name
        tokens, targets = _tokens_and_targets(micro.rows, model)
        self.sums.add({f"{model}/loss_tokens": tokens, f"{model}/loss_targets": targets})


def _tokens_and_targets(rows: DataProto, model: str) -> tuple[Tensor, Tensor]:
    """Counts the sampled tokens of rows, and sums their advantages, a critic's returns: 0-dim."""
    mask = rows.batch["response_mask"]
    targets = rows.batch["returns" if model == "critic" else "advantages"]
    return mask.sum(), (targets * mask).sum()


class FirstUpdateDifference(SummingProbe):
    """Measures how far log-probs and values of a step's first update are from those before it.

    The model is still the same, so that what differs is numerics: actor/first_update_diff and
    critic/first_update_diff, means over tokens.

    Args:
        bypasses: whether the old log-probs are the engine's, and not this model's own.
    """

    def __init__(self, *, bypasses: bool = False) -> None:
        super().__init__()
        self.bypasses = bypasses

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Adds a micro-batch's shares of the means; the first update stands for all."""
        if self.mini.number > 0:
            return
        # Else the loss had the policy's own of this very pass.
        has_own_before = "old_log_probs" in micro.rows.batch and not self.bypasses
        if "log_prob" in outputs and has_own_before:
            self._add_log_probs(outputs["log_prob"].detach(), fields)
        if "values" in outputs:
            self._add_values(outputs["values"].detach(), fields)

    def _add_log_probs(self, log_prob: Tensor, fields: LossFields) -> None:
        difference = (log_prob - fields["old_log_probs"]).abs()
        mask = fields["response_mask"]
        mean = algos.agg_loss(difference, mask, "token-mean", **self.mini.counts)
        share = mean * self.mini.updates / world_size()
        self.sums.add({"actor/first_update_diff": share}, self.mini.weight)

    def _add_values(self, values: Tensor, fields: LossFields) -> None:
        difference = (values - fields["values"]).abs() * fields["response_mask"]
        tokens = max(self.mini.counts["batch_num_tokens"] or 0, 1)
        share = difference.sum() * self.mini.updates / tokens
        self.sums.add({"critic/first_update_diff": share}, self.mini.weight)

    def divide(self, by: GroupCounts) -> None:
        """Makes means over tokens of the sums."""
        self.sums.divide(by.tokens, {})
