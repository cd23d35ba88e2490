"""How a model is run: its compute type, its device, and how the rows of a batch are laid out.

Invariant: rows are packed only for a model that was seen to compute packed rows rightly
(packing_check.py).
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from training.config import CriticModelConfig, ModelConfig
from workers.model.builder import torch_dtype
from workers.model.packing_check import (
    check_shared_sequences,
    keeps_state,
    pack_rows,
    varies_with_length,
)
from workers.model.shared_prefix import key_cost
from workers.ranks.process_groups import rank_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """Holds how a module is run: compute type, device, and how rows are laid out.

    Attributes:
        strip_padding: rows are computed without their padding.
        pack_rows: rows lie one behind the other; for models that `use_packed_attention`.
        key_cost: what a copied key of what packed rows share costs (`order_rows`); None: they share
            nothing.
        tells_boundaries: layers of the model keep a state, and are told where a packed row begins.
        sequence_group: the sequence-parallel group of this rank: ranks that share each sequence,
            with the same rows.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    strip_padding: bool = True
    pack_rows: bool = False
    key_cost: float | None = None
    tells_boundaries: bool = False
    sequence_group: dist.ProcessGroup | None = None

    @property
    def sequence_ranks(self) -> int:
        """Returns the size of the sequence-parallel group."""
        return 1 if self.sequence_group is None else self.sequence_group.size()

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in `dtype` within the block."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def forward_settings(
    model: ModelConfig | CriticModelConfig,
    share_prompts: bool,
    module: nn.Module,
    device: torch.device,
    ranks: int = 1,
    *,
    role: str = "model",
) -> ForwardSettings:
    """Chooses how a model is run; where its rows are packed it attends through attention.py.

    They are packed where its layers allow it, and then share what they begin with, if
    `share_prompts` asks for it. A layer's state, which is of one row, cannot be shared; and padding
    on the left may reach it, so that rows are stripped of that wherever there is one.

    Args:
        role: what the model is in the run, such as "actor"; messages name it.
    Raises:
        ValueError: it does not allow a sequence-parallel group of `ranks` ranks.
    """
    owner = f"{role} ({model.path})"
    packs = model.use_remove_padding and pack_rows(module)
    has_states = keeps_state(module.config)
    if has_states and not model.use_remove_padding:
        logger.info(
            "%s: use_remove_padding=false, but its layers keep a state, which padding on the left "
            "would reach: rows are padded on the right alone",
            owner,
        )
    shares = share_prompts and packs and not has_states
    if share_prompts and not shares:
        rows = "packed" if packs else "padded"
        logger.info(
            "%s: rows are %s, and the prompt of a group is computed anew for each of its rows",
            owner,
            rows,
        )
    if varies_with_length(module):
        logger.warning(
            "%s: its rope_type turns positions by a micro-batch's longest row: log-probs depend on "
            "how a batch is cut where rows are longer than the model's original length",
            owner,
        )
    if ranks > 1:
        check_shared_sequences(module, ranks)
    cost_of_sharing = None
    if shares:
        cost_of_sharing = key_cost(module.config.get_text_config())
    return ForwardSettings(
        device=device,
        dtype=torch_dtype(model.dtype),
        strip_padding=model.use_remove_padding or has_states,
        pack_rows=packs,
        key_cost=cost_of_sharing,
        tells_boundaries=packs and has_states,
        sequence_group=rank_group(ranks),
    )
