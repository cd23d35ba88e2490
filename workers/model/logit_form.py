"""What models do to their head's products to make logits of them: divide, multiply, cap.

Invariant: a model of another kind is refused before training (`check_forward`), not trained on
wrong log-probs.
"""

from torch import nn

from training.batch.head import LogitForm


def logit_form(lm: nn.Module, temperature: float = 1.0) -> LogitForm:
    """Returns what a model does to its head's products, its logits divided by a temperature."""
    settings = lm.config.get_text_config().to_dict()
    # Granite.
    scaling = settings.get("logits_scaling") or 1
    # Cohere.
    factor = settings.get("logit_scale") or 1
    # Gemma 2.
    cap = settings.get("final_logit_softcapping")
    return LogitForm(
        divisor=temperature * scaling / factor,
        cap=cap / temperature if cap else None,
    )
