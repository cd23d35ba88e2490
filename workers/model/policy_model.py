"""The models as PPO runs them: a policy, a policy with values, and a value model.

Invariant: the head runs on the states that predict sampled tokens only. Where their logits would be
large they are computed in chunks that are made again in the backward pass, so that whole logits
never exist.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from training.batch.head import (
    BANNED,
    EntropyMode,
    LabelLogProbs,
    candidate_log_probs,
    head_log_probs,
    top_log_probs,
)
from workers.model.logit_form import logit_form
from workers.model.packing import ForwardBatch
from workers.model.router_replay import routed
from workers.model.training_pass import learn_all_embeddings, set_training

# Logits that exist at a time, at two bytes each; under this nothing is recomputed.
LOGITS_CHUNK_BYTES = 1 << 28


class PolicyValueModel(nn.Module):
    """Wraps a causal language model, `lm`, with a value head: one output a state, zero at first.

    It trains as it is in place of a language model (`critic.share_backbone`); `lm.generate` samples
    from it.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        learn_all_embeddings(lm)
        self.lm = lm
        hidden_size = lm.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=False, device=lm.device)
        nn.init.zeros_(self.value_head.weight)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Self:
        """Loads a language model by folder or hub name, in float32; `options` are transformers'."""
        options = {"dtype": torch.float32} | options
        return cls(AutoModelForCausalLM.from_pretrained(path, **options))

    def train(self, mode: bool = True) -> Self:
        """Switches training on or off, without what is random in it; see training_pass.py."""
        set_training(self, mode)
        self.training = mode
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes logits (B, L, vocabulary) and values (B, L), both float32, from ids (B, L).

        Positions count the tokens of `attention_mask` (B, L), wherever the padding is, unless they
        are passed.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if position_ids is None:
            position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self.lm(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            output_hidden_states=True,
        )
        values = self.value_head(output.hidden_states[-1])  # (B, L, 1)
        return output.logits.float(), values.float().squeeze(-1)


class PolicyModel(nn.Module):
    """Wraps a policy: its forward returns what PPO needs of sampled tokens, never a batch's logits.

    It is made of a causal language model, or of a `PolicyValueModel`, whose values come from the
    same pass.

    Args:
        banned_token_ids: ids that are never sampled; the distribution is that over the others.
    """

    def __init__(self, lm: nn.Module, banned_token_ids: Sequence[int] = ()) -> None:
        super().__init__()
        learn_all_embeddings(lm)
        self.banned_token_ids = tuple(banned_token_ids)
        # As `head_log_probs` takes it, on the device where it was needed last.
        self.penalty: Tensor | None = None
        self.value_head: nn.Module | None
        if isinstance(lm, PolicyValueModel):
            self.lm = lm.lm
            self.value_head = lm.value_head
        else:
            self.lm = lm
            self.value_head = None

    @property
    def trained(self) -> nn.Module:
        """Returns the part that trains, and that checkpoints name: the language model, or all."""
        if self.value_head is None:
            return self.lm
        return self

    def train(self, mode: bool = True) -> Self:
        """Switches training on or off, without what is random in it; see training_pass.py."""
        set_training(self, mode)
        self.training = mode
        return self

    def forward(
        self, batch: ForwardBatch, entropy: EntropyMode = "none", top: int = 0
    ) -> list[Tensor]:
        """Computes log-probs and what else is asked for of the sampled tokens.

        Args:
            entropy: "value" adds entropies, "grad" entropies with a gradient, "squares" entropies
                and sums of the vocabulary's squared probabilities.
            top: so many of each state's likeliest words are returned, without a gradient.
        Returns: (N,) float32 each: log-probs; entropies; squares; the values, where the model has
            any; then (N, K) log-probs of the candidates, where the batch names any; last, with
            `top`, log-probs and ids of the likeliest words, (N, top) each, or all words there are.
        """
        with routed(batch.router_pass):
            # (T, L, hidden)
            hidden = self.lm.base_model(**batch.model_inputs()).last_hidden_state
        if batch.router_pass is not None and not batch.router_pass.chosen:
            raise ValueError(
                "the batch has routed_experts, and the model does not heed them: call open_routers "
                "(workers/model/router_replay.py) on it, or leave the field out"
            )
        states = hidden.flatten(0, 1)[batch.logit_positions]  # (N, hidden)
        head = self.lm.get_output_embeddings()
        form = logit_form(self.lm, batch.temperature)
        penalty = self._penalty_on(head.weight)
        log_probs, entropies = head_log_probs(
            states,
            head.weight,
            head.bias,
            batch.labels,
            form,
            entropy=entropy,
            chunk=LOGITS_CHUNK_BYTES // 2,
            penalty=penalty,
        )
        outputs = [log_probs]
        if entropies is not None:
            # "squares" gives two rows.
            outputs.extend(torch.atleast_2d(entropies))
        if self.value_head is not None:
            outputs.append(self.value_head(states).float().squeeze(-1))
        if batch.candidates is not None:
            known = LabelLogProbs(batch.labels, log_probs)
            outputs.append(
                candidate_log_probs(
                    states, head.weight, head.bias, known, batch.candidates, form, penalty=penalty
                )
            )
        if top:
            outputs.extend(top_log_probs(states, head.weight, head.bias, form, top, penalty))
        return outputs

    def _penalty_on(self, weight: Tensor) -> Tensor | None:
        """Returns what is added to the logits of a head (vocabulary, hidden): (vocabulary,)."""
        if not self.banned_token_ids:
            return None
        if self.penalty is None or self.penalty.device != weight.device:
            penalty = torch.zeros(len(weight), device=weight.device)
            penalty[list(self.banned_token_ids)] = BANNED
            self.penalty = penalty
        return self.penalty


class ValueModel(nn.Module):
    """Wraps a transformer with one output a token: the value of its state."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        learn_all_embeddings(transformer)
        self.transformer = transformer

    def train(self, mode: bool = True) -> Self:
        """Switches training on or off, without what is random in it; see training_pass.py."""
        set_training(self, mode)
        self.training = mode
        return self

    def forward(self, batch: ForwardBatch) -> list[Tensor]:
        """Computes the values of the states before sampled tokens, (N,) float32."""
        values = self.transformer(**batch.model_inputs()).logits  # (T, L, 1)
        return [values.float().flatten()[batch.logit_positions]]
