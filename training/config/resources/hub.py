"""Asks Hugging Face's hub whether it has a model, before anything is loaded from there.

What loads a model tries an unreachable hub again and again, which takes a minute. Invariant: an
answer comes within seconds, and what is in the cache needs none.
"""

TIMEOUT_S = 10.0
# A model, or adapters, have one of these at least.
CONFIGS = ("config.json", "adapter_config.json")


def hub_refusal(name: str) -> str | None:
    """Says why a model cannot be had from the hub; None: it can be, or lies in the cache."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
        return None
    try:
        HfApi().model_info(name, timeout=TIMEOUT_S)
    # A network, a proxy or the hub fail in many ways, each of which is told.
    except Exception as error:
        said = str(error).strip() or repr(error)
        return said.splitlines()[0]
    return None
