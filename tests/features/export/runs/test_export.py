"""Exports of whole runs: what a finished run trained is what transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from features.export import export
from setup import create_inference_engine
from tests.e2e.test_training import tiny_config, train
from tests.features.export.test_export import IDS, logits, write_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_finished_run_that_never_asked_for_it_is_exported(
    tiny_task: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_task, tmp_path / "run", "trainer.save_freq=1")
    trainer = train(config)
    expected = logits(trainer.actor_rollout_wg.worker.module)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    before = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert (logits(before) - expected).abs().max() > 1e-3, "it has learnt"
    card = (tmp_path / "out/README.md").read_text()
    assert "## Metrics at step 2" in card and "val-core/guess\\_the\\_number/reward/mean@1" in card
    assert (tmp_path / "out/curve.png").exists()


@pytest.mark.vllm
def test_vllm_loads_merged_adapters_and_computes_the_policys_log_probs(
    tiny_task: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    write_run(tmp_path / "run", tiny_task / "model", "lora")
    export.export(tmp_path / "run", tmp_path / "out")
    engine = create_inference_engine(
        str(tmp_path / "out"), "vllm", {"dtype": "float32", "max_model_len": 64}
    )
    prompt = IDS[0].tolist()
    (completion,) = engine.rollout.inference([prompt], engine.sampling(8, seed=1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=1e-4)
