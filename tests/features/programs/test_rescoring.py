"""Plain re-scoring of programs' rows by the model gives what the engine reported."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.turn_tokens import TurnTokens
from tests.features.programs.hostile import MOVES, play
from tests.unit.test_rollout import CONFIG, build_engine, model_spec, perturb
from workers.weight_sync.manifest import iter_weights, weight_manifest


@pytest.mark.seconds
def test_scoring_a_programs_rows_again_gives_the_log_probs_that_were_sampled_with(
    tiny_task: Path,
) -> None:
    spec = model_spec(tiny_task / "model")
    lm = spec.causal_lm(trainable=True).eval()
    perturb(lm, seed=0)
    engine = build_engine("hf", spec, replace(CONFIG, response_length=80, max_model_len=160))
    engine.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    tokens = TurnTokens(spec.tokenizer, template_kwargs={}, eos_token_ids=spec.eos_token_ids)
    compared = rows = 0
    for seed in range(25):
        rng = random.Random(seed)
        moves = [(rng.choice(MOVES), rng.randrange(20)) for _ in range(14)]
        episode, _, _ = play(moves, tokens, seed, engine=engine)
        for row in episode.rows:
            if not row.spans:
                continue
            rows += 1
            with torch.no_grad():
                logits = lm(torch.tensor([row.token_ids])).logits[0].double()
            log_probs = logits.log_softmax(-1)
            for span in row.spans:
                for place in range(span.start, span.end):
                    behind = len(row.prompt_ids) + place - 1
                    expected = log_probs[behind, row.ids[place]].item()
                    assert abs(row.log_probs[place] - expected) < 1e-4
                    compared += 1
    assert compared > 500 and rows > 60, (compared, rows)
