"""Engines by themselves, conversations, and episodes with tools.

A public path: `from setup.inference import create_inference_engine` and the rest. engines.py and
multi_turn.py define them.
"""

from setup.engines import (
    BaseInferenceEngine,
    BatchInferenceManager,
    HFInferenceEngine,
    InferenceOutput,
    SGLangInferenceEngine,
    VLLMInferenceEngine,
    create_inference_engine,
)
from setup.multi_turn import MultiTurnInferenceEngine

__all__ = [
    "BaseInferenceEngine",
    "BatchInferenceManager",
    "HFInferenceEngine",
    "InferenceOutput",
    "MultiTurnInferenceEngine",
    "SGLangInferenceEngine",
    "VLLMInferenceEngine",
    "create_inference_engine",
]
