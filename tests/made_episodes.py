"""Makes records of a run that was never played, in the form in which a run writes its own.

Episodes have turns, tools, failures and several weight versions; numbers of the update are random,
but advantages are those that the estimator makes of the rewards. For tests of the viewer and its
benchmark.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.array_ops import object_array
from data.protocol import DataProto
from training.advantage import compute_advantage
from training.config import AlgorithmConfig

FATES = {
    "trained": "It was trained on.",
    "environment": "The environment wrote it.",
    "template": "The chat template wrote it.",
    "clipped": "Its ratio was outside the clipping range, so its gradient is zero.",
    "no_spread": "All scores of its group are equal, so its advantage is zero.",
    "filtered": "Its group was filtered out: all its scores are equal.",
    "rejected": "Rollout correction rejected it.",
}
CODES = {name: code for code, name in enumerate(FATES)}
SYLLABLES = ["ba", "co", "di", "fu", "ge", "hi", "jo", "ku", "la", "me", "ni", "po", "qua", "ri"]
SYLLABLES += ["so", "tu", "ve", "wi", "xo", "yu", "za", "shi", "tra", "blo"]


@dataclass(frozen=True)
class Made:
    """Says what records to make.

    Attributes:
        steps, groups, members: so many steps, of so many groups, of so many episodes.
        tokens: of an episode's response, about half of them sampled.
        turns: of an episode.
        estimator: of the advantages.
        extra: columns of the update beside the always recorded ones.
    """

    steps: int = 2
    groups: int = 4
    members: int = 4
    tokens: int = 60
    turns: int = 3
    estimator: str = "grpo"
    seed: int = 0
    words: int = 2000
    extra: tuple[str, ...] = (
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_prob",
        "log_prob",
        "entropy",
        "policy_weight",
        "weight_versions",
    )
    initial: str = "Find the word that {} hides in room {}."
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


def words(number: int) -> list[str]:
    """Makes so many words, each other than the rest."""
    rng = np.random.default_rng(7)
    made: dict[str, None] = {}
    while len(made) < number:
        made["".join(rng.choice(SYLLABLES, size=int(rng.integers(1, 5))))] = None
    return list(made)


def make_tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, two marks and an unknown one."""
    names = ["<unk>", "<turn>", "<end>", *vocabulary]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def packed(array: np.ndarray) -> dict[str, str]:
    """Writes an array of a row as records have it."""
    return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}


def make_run(run_dir: Path, made: Made) -> Path:
    """Writes RUN_DIR/episodes: a file of episodes and one of the update for each step."""
    folder = run_dir / "episodes"
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = words(made.words)
    make_tokenizer(vocabulary).save_pretrained(folder / "tokenizer")
    for step in range(1, made.steps + 1):
        _make_step(folder, made, step, vocabulary)
    return folder


def _make_step(folder: Path, made: Made, step: int, vocabulary: list[str]) -> None:
    rng = np.random.default_rng([made.seed, step])
    episodes = []
    for group in range(made.groups):
        equal = group == made.groups - 1
        shared = float(rng.integers(0, 2))
        hidden = vocabulary[int(rng.integers(len(vocabulary)))]
        for member in range(made.members):
            reward = shared if equal else float(np.round(rng.random(), 3))
            episodes.append(_make_episode(rng, made, step, group, member, reward, hidden))
    with (folder / f"{step}.jsonl").open("w") as file:
        for episode in episodes:
            texts = _texts(episode, made, vocabulary)
            file.write(json.dumps({**_entries(episode, made, step), **texts}) + "\n")
    np.savez(folder / f"{step}.npz", **_update(episodes, made, step, rng))


def _make_episode(
    rng: np.random.Generator,
    made: Made,
    step: int,
    group: int,
    member: int,
    reward: float,
    hidden: str,
) -> dict[str, Any]:
    """Draws an episode's tokens: turns of sampled ones, each but the last followed by a reply."""
    length = max(made.turns * 4, int(made.tokens * rng.uniform(0.8, 1.2)))
    # Words as frequent as in a language.
    ranks = rng.zipf(1.3, size=length) % made.words
    ids = (ranks + 3).astype("<i4")
    edges = np.linspace(0, length, 2 * made.turns).astype(int)
    turn_ids = np.full(length, -1, dtype="<i2")
    template = np.zeros(length, dtype="|i1")
    for turn in range(made.turns):
        turn_ids[edges[2 * turn] : edges[2 * turn + 1]] = turn
        if turn + 1 < made.turns:
            ids[edges[2 * turn + 1]] = 1
            template[edges[2 * turn + 1]] = 1
    sampled = turn_ids >= 0
    rewards = np.zeros(length, dtype="<f4")
    rewards[np.flatnonzero(sampled)[-1]] = reward
    log_probs = np.where(sampled, -rng.exponential(0.6, length), 0).astype("<f4")
    number = group * made.members + member
    ending = ("done", "done", "done", "max_turns", "overflow", "env_crash")[number % 6]
    return {
        "uid": f"group-{step}-{group}",
        "episode_id": f"episode-{step}-{group}-{member}",
        "group": group,
        "prompt_ids": (rng.integers(3, made.words + 3, size=12)).astype("<i4"),
        "response_ids": ids,
        "turn_ids": turn_ids,
        "template_mask": template,
        "edges": edges,
        "log_probs": log_probs,
        "rewards": rewards,
        "reward": reward,
        "ending": ending,
        "hidden": hidden,
        "versions": np.where(sampled, step - 1 - (number % 5 == 0), -1).astype("<i4"),
        "attempts": 1 + (number % 7 == 6),
    }


def _texts(episode: dict[str, Any], made: Made, vocabulary: list[str]) -> dict[str, Any]:
    """Writes messages and turns as the tokens say them."""

    def say(start: int, end: int) -> str:
        ids = episode["response_ids"][start:end].tolist()
        return " ".join("<turn>" if one == 1 else vocabulary[one - 3] for one in ids)

    edges = episode["edges"]
    turns = []
    for turn in range(made.turns):
        is_last = turn + 1 == made.turns
        reply = "" if is_last else say(edges[2 * turn + 1], edges[2 * turn + 2])
        calls = [{"name": "look_up", "arguments": {"word": reply[:8]}}] if turn == 1 else []
        turns.append(
            {
                "text": say(edges[2 * turn], edges[2 * turn + 1]),
                "reward": episode["reward"] if is_last else 0.0,
                "finish_reason": "stop",
                "observation": [{"role": "user", "content": reply}] if reply else [],
                "done": is_last,
                "engine_seconds": 0.25,
                "env_seconds": 0.01,
                "tool_calls": calls,
                "info": {},
                "anchor": f"state {turn}",
            }
        )
    first = made.initial.format(episode["hidden"], episode["group"])
    return {
        "initial_messages": [
            {"role": "system", "content": "You are in a house with many rooms."},
            {"role": "user", "content": first},
        ],
        "turns": turns,
    }


def _entries(episode: dict[str, Any], made: Made, step: int) -> dict[str, Any]:
    row = {
        "prompt_ids": packed(episode["prompt_ids"]),
        "response_ids": packed(episode["response_ids"]),
        "response_mask": packed((episode["turn_ids"] >= 0).astype("|i1")),
        "turn_ids": packed(episode["turn_ids"]),
        "template_mask": packed(episode["template_mask"]),
        "log_probs": packed(episode["log_probs"]),
        "rewards": packed(episode["rewards"]),
        "parent": None,
    }
    crashed = episode["ending"] == "env_crash"
    failed = {"turns": [], "ending": "env_crash", "error": "ConnectionError: gone"}
    return {
        "step": step,
        "uid": episode["uid"],
        "episode_id": episode["episode_id"],
        "data_source": "house",
        "environment": "house",
        "agent_index": 0,
        "env_seed": 100 + episode["group"],
        "task": {},
        "task_name": "",
        "ending": episode["ending"],
        "error": "Traceback: the door is stuck" if crashed else "",
        "paid": episode["reward"],
        "reward": episode["reward"],
        "masked": False,
        "attempts": episode["attempts"],
        "attempt": episode["attempts"] - 1,
        "seconds": 1.5,
        "env_seconds": 0.2,
        "tool_calls": [{"name": "look_up"}],
        "info": {},
        "sampled_tokens": int((episode["turn_ids"] >= 0).sum()),
        "cut_turns": 0,
        "failed_attempts": [failed] * (episode["attempts"] - 1),
        "rows": [row],
        **made.changes.get(episode["episode_id"], {}),
    }


def _update(
    episodes: list[dict[str, Any]], made: Made, step: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Makes the columns of the step's update."""
    lengths = [len(episode["response_ids"]) for episode in episodes]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    sampled = np.concatenate([episode["turn_ids"] >= 0 for episode in episodes])
    rewards = np.concatenate([episode["rewards"] for episode in episodes])
    engine = np.concatenate([episode["log_probs"] for episode in episodes])

    def around(values: np.ndarray, spread: float) -> np.ndarray:
        noise = rng.normal(0, spread, total)
        return np.where(sampled, np.minimum(values + noise, 0), 0).astype(np.float32)

    old = around(engine, 0.02)
    columns = {
        "response_mask": sampled.astype(np.int8),
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "old_log_probs": old,
        "rollout_log_probs": engine,
        "ref_log_prob": around(old, 0.2),
        "log_prob": around(old, 0.1),
        "values": np.where(sampled, rng.random(total), 0).astype(np.float32),
        "entropy": np.where(sampled, rng.exponential(1.0, total), 0).astype(np.float32),
        "weight_versions": np.concatenate([episode["versions"] for episode in episodes]),
    }
    advantages, returns = estimate(episodes, columns, made, offsets)
    columns |= {"advantages": advantages, "returns": returns}
    columns["policy_weight"] = (advantages / max(int(sampled.sum()), 1)).astype(np.float32)
    always = {"response_mask", "token_level_scores", "token_level_rewards"}
    kept = always | {"advantages", "returns"} | set(made.extra)
    return {
        **{name: column for name, column in columns.items() if name in kept},
        "fate": _fates(episodes, sampled, advantages, old, columns["log_prob"]),
        "episode_id": np.array([episode["episode_id"] for episode in episodes]),
        "uid": np.array([episode["uid"] for episode in episodes]),
        "episode_row": np.zeros(len(episodes), dtype=np.int64),
        "times_trained": np.ones(len(episodes), dtype=np.int64),
        "gradient_share": rng.dirichlet(np.ones(len(episodes))).astype(np.float32),
        "offsets": offsets,
        "meta": np.array(json.dumps(_meta(made, step))),
    }


def estimate(
    episodes: list[dict[str, Any]],
    columns: dict[str, np.ndarray],
    made: Made,
    offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Makes advantages and returns, flat, as training does."""
    width = int(np.diff(offsets).max())
    is_token = np.arange(width) < np.diff(offsets)[:, None]
    tensors = {}
    turn_ids = np.concatenate([episode["turn_ids"] for episode in episodes])
    for name, column in {**columns, "turn_ids": turn_ids}.items():
        padded = np.full(is_token.shape, -1 if name == "turn_ids" else 0, dtype=column.dtype)
        padded[is_token] = column
        tensors[name] = torch.from_numpy(padded)
    states = [f"state {turn}" for turn in range(made.turns)]
    batch = DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            "uid": object_array([episode["uid"] for episode in episodes]),
            "episode_id": object_array([episode["episode_id"] for episode in episodes]),
            "episode_row": np.zeros(len(episodes), dtype=np.int64),
            "anchors": object_array([states] * len(episodes)),
        },
    )
    compute_advantage(batch, made.estimator, config=AlgorithmConfig(adv_estimator=made.estimator))
    made_of = [batch.batch[name][torch.from_numpy(is_token)] for name in ("advantages", "returns")]
    return made_of[0].float().numpy(), made_of[1].float().numpy()


def _fates(
    episodes: list[dict[str, Any]],
    sampled: np.ndarray,
    advantages: np.ndarray,
    old: np.ndarray,
    new: np.ndarray,
) -> np.ndarray:
    template = np.concatenate([episode["template_mask"] for episode in episodes]) > 0
    fates = np.full(len(sampled), CODES["trained"], dtype=np.uint8)
    ratio = np.exp(new - old)
    fates[(ratio > 1.2) & (advantages > 0) | (ratio < 0.8) & (advantages < 0)] = CODES["clipped"]
    fates[advantages == 0] = CODES["no_spread"]
    fates[~sampled] = CODES["environment"]
    fates[template] = CODES["template"]
    return fates


def _meta(made: Made, step: int) -> dict[str, Any]:
    return {
        "format": 1,
        "step": step,
        "adv_estimator": made.estimator,
        "loss_mode": "vanilla",
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
        "kl": {},
        "rollout_correction": {},
        "fates": {
            str(code): {"name": name, "sentence": FATES[name]} for name, code in CODES.items()
        },
        "columns": {"advantages": "What the loss weighs the token's log-prob with."},
        "metrics": {},
        "dropped": [],
    }
