"""Metrics of a step under verl's names, and validation: the same prompts every time, answered and scored.

Invariant: averages are per episode, not per row. An episode may own several rows (they share an `episode_id`): it
counts once, with the sum of its rows' scores and tokens. Dummy rows, which only pad a batch to the ranks, never count.
A batch of validation is never trained on.
"""

import json
import logging
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from custom.tools import UNKNOWN
from data.containers import row_blocks, row_sums
from data.protocol import DataProto
from data.texts import say, warn_once
from data.watch import WATCH, beat
from training.batch.batching import EpisodeRows, real_rows, rows_by_key
from workers.rollout.episode import ENDINGS, FAILURES

logger = logging.getLogger(__name__)
Reduction = Callable[[list[Any]], float]
# Sections of a step whose time is put down to every token of the batch; generation's goes to the response's tokens.
_SECTIONS_OVER_ALL_TOKENS = (
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduces each metric to a float: the largest if its name has the word max, the smallest for min, else the mean.

    Args:
        metrics: name -> a number, an array or tensor of any shape, or a list of numbers and 0-dim tensors.
    """
    reduced = {}
    for name, values in metrics.items():
        words, numbers = (
            re.split(r"[^a-z]+", name.lower()),
            torch.as_tensor(values, dtype=torch.float64),
        )
        found = (
            numbers.max() if "max" in words else numbers.min() if "min" in words else numbers.mean()
        )
        reduced[name] = found.item()
    return reduced


def _moments(
    values: Tensor, mask: Tensor | None = None, less: Tensor | float = 0.0
) -> dict[str, Tensor]:
    """Computes mean, max, min and var of values - less over the mask, in float64, a block of rows at a time.

    Nothing where there are no values, or none in the mask; None takes all.
    """
    parts: list[list[float]] = []
    less = torch.as_tensor(less).expand_as(values)
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    for rows in row_blocks(values):
        # numpy chooses by a mask thirty times as fast.
        part = torch.from_numpy(
            (values[rows].double() - less[rows].double()).numpy()[mask[rows].numpy()]
        )
        if count := part.numel():
            found = (part.mean(), part.max(), part.min(), part.var(correction=0))
            # As numbers: small tensors between the blocks would keep the heap from shrinking.
            parts.append([count, *(scalar.item() for scalar in found)])
    if not parts:
        return {}
    counts, means, highest, lowest, variances = torch.tensor(parts, dtype=torch.float64).T
    share = counts / counts.sum()
    mean = (share * means).sum()
    variance = (share * (variances + (means - mean) ** 2)).sum()
    return {"mean": mean, "max": highest.max(), "min": lowest.min(), "var": variance}


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Summarises scores, rewards and lengths per episode, and advantages, returns and values per sampled token.

    Args:
        batch: with token_level_scores, token_level_rewards, advantages, returns, response_mask (batch, response_len),
            with `use_critic` values, attention_mask (batch, prompt_len + response_len); uid, episode_id where known.
    Returns:
        critic/{score,rewards,advantages,returns,values}/{mean,max,min}, critic/vf_explained_var,
        {response,prompt}_length/{mean,max,min,clip_ratio} in tokens, environment tokens included (an episode's
        prompt is its rows' shortest), response/aborted_ratio (episodes without a sampled token, such as masked ones,
        which scores and rewards leave out).
    """
    tensors, episodes = batch.batch, EpisodeRows(batch)
    mask = tensors["response_mask"].bool()  # (batch, response_len)
    prompt_width = tensors["attention_mask"].shape[-1] - mask.shape[-1]
    prompts, responses = (
        tensors["attention_mask"].bool().split([prompt_width, mask.shape[-1]], dim=-1)
    )
    live = episodes.fold(mask.any(-1), "amax") > 0
    scores, rewards = (
        episodes.fold(tensors[f"token_level_{name}"].sum(-1))[live]
        for name in ("scores", "rewards")
    )
    names = ("advantages", "returns", *(["values"] if use_critic else []))
    tokens = {f"critic/{name}": _moments(tensors[name], mask) for name in names}
    found = {"critic/score": _moments(scores), "critic/rewards": _moments(rewards), **tokens}
    found["response_length"] = _moments(episodes.fold(row_sums(responses)))
    found["prompt_length"] = _moments(episodes.fold(row_sums(prompts), "amin"))
    metrics = {
        f"{name}/{kind}": x
        for name, own in found.items()
        for kind, x in own.items()
        if kind != "var"
    }
    if real_rows(batch).any():
        metrics["response_length/clip_ratio"] = episodes.fold(responses.all(-1), "amax").mean()
        metrics["prompt_length/clip_ratio"] = episodes.fold(prompts.all(-1), "amax").mean()
        metrics["response/aborted_ratio"] = 1 - live.double().mean()
    if use_critic and mask.any():
        error = _moments(tensors["returns"], mask, less=tensors["values"])
        metrics["critic/vf_explained_var"] = 1 - error["var"] / (
            tokens["critic/returns"]["var"] + 1e-5
        )
    return {name: value.item() for name, value in metrics.items()}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Reports the seconds of every section, and the milliseconds per token of those that work on tokens.

    Args:
        timing_raw: section -> seconds.
    Returns: timing_s/NAME, and timing_per_token_ms/NAME for the sections that work on tokens.
    """
    response_width = batch.batch["response_mask"].shape[-1]
    attended, real = batch.batch["attention_mask"], real_rows(batch)
    tokens = dict.fromkeys(_SECTIONS_OVER_ALL_TOKENS, int(row_sums(attended)[real].sum()))
    tokens["gen"] = int(row_sums(attended[:, -response_width:])[real].sum())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    timed = [name for name in timing_raw if tokens.get(name)]
    return metrics | {
        f"timing_per_token_ms/{name}": timing_raw[name] * 1000 / tokens[name] for name in timed
    }


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Measures the step's throughput; needs its seconds as timing_raw["step"].

    Returns: perf/total_num_tokens, perf/time_per_step (s), perf/throughput (tokens/s per GPU).
    """
    tokens, seconds = (
        int(row_sums(batch.batch["attention_mask"])[real_rows(batch)].sum()),
        timing_raw["step"],
    )
    rate = tokens / (seconds * n_gpus)
    return {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": rate}


# Validation: several samples per prompt


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Reduction],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Estimates (mean, std) of each function over `n_bootstrap` subsets, drawn with replacement."""
    draws = np.random.default_rng(seed).integers(len(data), size=(n_bootstrap, subset_size))
    subsets = [[data[i] for i in draw] for draw in draws.tolist()]
    results = np.array([[fn(subset) for subset in subsets] for fn in reduce_fns], dtype=np.float64)
    return [(float(row.mean()), float(row.std())) for row in results]


def calc_maj_val(data: Sequence[Any], vote_key: Any, val_key: Any) -> float:
    """Returns the value of the most frequent vote; the earliest of equally frequent ones."""
    winner = Counter(item[vote_key] for item in data).most_common(1)[0][0]
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, float]]]:
    """Averages each variable of a data source over the N samples of a prompt, and then over prompts.

    Args:
        data_sources, sample_uids: of each sample; samples of one prompt share their uid.
        infos_dict: variable -> one entry per sample, None where it has none. In each source a variable counts if all
            its samples have a number (sources may be scored by different rules); text is left out, but `pred` is what
            majority votes are about, None being a vote too unless the whole source has no other.
        seed: of the resampling behind maj@k.
    Returns:
        {source: {variable: {metric: value}}} with mean@N, and for N > 1: std@N and, for k = 2, 4, ... N,
        {best,worst}@k/{mean,std} (exact, over k draws with replacement) and maj@k/{mean,std} (1,000 resamples) where
        there is a `pred`.
    Raises: ValueError for a variable that does not have one entry per sample.
    """
    if wrong := {
        name: len(values) for name, values in infos_dict.items() if len(values) != len(data_sources)
    }:
        raise ValueError(say("lengths_differ", samples=len(data_sources), wrong=wrong))
    same_shape: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for (source, _), rows in rows_by_key(zip(data_sources, sample_uids, strict=True)).items():
        same_shape[source, len(rows)].append(rows)
        rows_of[source] += rows
    numbers = {
        name: np.array([_as_number(value) for value in values])
        for name, values in infos_dict.items()
    }
    preds = infos_dict.get("pred", [None] * len(data_sources))
    result: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (source, n), groups in same_shape.items():
        votes = [[str(preds[row]) for row in rows] for rows in groups]
        voted = n > 1 and any(preds[row] is not None for row in rows_of[source])
        for name, values in numbers.items():
            if all(value is not None for value in values[rows_of[source]]):
                samples = values[np.array(groups)].astype(np.float64)  # (prompts, N)
                result[source][name] |= _sample_metrics(samples)
                if voted:
                    result[source][name] |= _majority_metrics(samples, votes, seed)
    return {source: dict(variables) for source, variables in result.items()}


def _as_number(value: Any) -> float | None:
    """Makes a float; None of what is no number, or an int beyond the largest float."""
    with suppress(OverflowError):
        if isinstance(value, int | float | np.integer | np.floating | np.bool_):
            return float(value)
    return None


def _subset_sizes(n: int) -> list[int]:
    """Lists 2, 4, 8, ... below n, and n itself."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]


def _sample_metrics(samples: np.ndarray) -> dict[str, float]:
    n = samples.shape[1]
    metrics = {f"mean@{n}": float(samples.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(samples.std(axis=1).mean())
    ascending = np.sort(samples, axis=1)
    for k in _subset_sizes(n):
        # The largest of k draws with replacement is at most the i-th smallest with probability (i/n)^k.
        largest = np.diff((np.arange(n + 1) / n) ** k)
        for name, weights in (("best", largest), ("worst", largest[::-1])):
            mean = ascending @ weights  # (prompts,)
            variance = np.maximum(ascending**2 @ weights - mean**2, 0)
            metrics |= {
                f"{name}@{k}/mean": float(mean.mean()),
                f"{name}@{k}/std": float(np.sqrt(variance).mean()),
            }
    return metrics


def _majority_metrics(
    samples: np.ndarray, votes: Sequence[Sequence[Any]], seed: int
) -> dict[str, float]:
    majority = partial(calc_maj_val, vote_key=0, val_key=1)
    prompts = [
        list(zip(own, values, strict=True))
        for own, values in zip(votes, samples.tolist(), strict=True)
    ]
    metrics: dict[str, float] = {}
    for k in _subset_sizes(samples.shape[1]):
        per_prompt = [bootstrap_metric(ballots, k, [majority], seed=seed)[0] for ballots in prompts]
        mean, std = np.mean(per_prompt, axis=0)
        metrics |= {f"maj@{k}/mean": float(mean), f"maj@{k}/std": float(std)}
    return metrics


def flatten_validation_metrics(
    nested: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, float]:
    """Names each value of {source: {variable: {metric: value}}} by the path to it.

    Returns: val-core/SOURCE/VARIABLE/METRIC for the reward, val-aux/SOURCE/VARIABLE/METRIC for the rest.
    """
    return {
        f"{'val-core' if variable == 'reward' else 'val-aux'}/{source}/{variable}/{metric}": value
        for source, variables in nested.items()
        for variable, metrics in variables.items()
        for metric, value in metrics.items()
    }


def validate(trainer: Any) -> dict[str, float]:
    """Scores the validation prompts, `val_kwargs.n` answers each; metrics as `val-core/SOURCE/REWARD/mean@N`."""
    if trainer.val_dataloader is None:
        return {}
    sources: list[str] = []
    uids: list[str] = []
    infos: dict[str, list[Any]] = {}
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    for rows in trainer.val_dataloader:
        batch, scored = _validate_batch(trainer, rows, n, first_group=len(uids) // n)
        names = batch.non_tensor_batch.get(
            trainer.config.data.reward_fn_key, np.full(len(batch), "unknown")
        )
        sources += [str(name) for name in names]
        uids += list(batch.non_tensor_batch["uid"])
        before = len(uids) - len(batch)
        # A source may have entries that others have not.
        for name in infos.keys() | scored.keys():
            infos.setdefault(name, [None] * before).extend(scored.get(name, [None] * len(batch)))
    return flatten_validation_metrics(
        process_validation_metrics(sources, uids, infos, seed=trainer.seed)
    )


def _validate_batch(
    trainer: Any, rows: dict[str, Any], n: int, first_group: int
) -> tuple[DataProto, dict[str, list[Any]]]:
    batch = trainer._generate_multi_turn_sequences(
        trainer.prompt_batch(rows, n, first_group, validate=True)
    )
    scores, infos = trainer.score(batch, trainer.val_reward_fn)
    batch.batch["token_level_scores"] = scores
    settings = trainer.config.trainer
    dump(
        batch,
        settings.validation_data_dir,
        trainer.global_steps,
        trainer.tokenizer,
        anew=first_group == 0,
    )
    trainer.on_batch(batch)
    shown = settings.log_val_generations - first_group * n
    for row in readable_rows(batch.slice(0, max(0, min(shown, len(batch)))), trainer.tokenizer):
        logger.info(
            "validation, reward %.3f\n%s\n--> %s", row["score"], row["input"], row["output"]
        )
    episodes = EpisodeRows(batch)
    infos = {name: [values[i] for i in episodes.first] for name, values in infos.items()}
    return batch.select_idxs(episodes.first), {
        **infos,
        "reward": episodes.join(scores).sum(dim=1).tolist(),
    }


def dump(
    batch: DataProto, folder: str | None, step: int, tokenizer: Any, anew: bool = True
) -> None:
    """Writes the batch's text and scores to FOLDER/STEP.jsonl, or adds them to what is there."""
    if folder is None:
        return
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if anew else "a") as file:
        for row in readable_rows(batch, tokenizer):
            file.write(json.dumps({"step": step, **row}) + "\n")


class StepTimer:
    """Measures seconds per named section of a step: `with timer("gen"): ...`; a section that comes twice adds up.

    The watch takes it for the place where the run is, and an error leaves it so.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, outer, WATCH.place = time.perf_counter(), WATCH.place, name
        beat(f"{name} began")
        yield
        WATCH.place = outer
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def write_episodes(folder: Path, batch: DataProto) -> None:
    """Writes a rollout's episodes to FOLDER/STEP.jsonl (validation's to val-STEP.jsonl), further ones of a step behind.

    A line is an episode in strict JSON, as `scripts/replay.py` reads it; a process that dies while it writes leaves all
    lines but the last whole.
    """
    meta, columns = batch.meta_info, batch.non_tensor_batch
    path = folder / f"{'val-' if meta['validate'] else ''}{meta['global_steps']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if 0 in columns["group_index"] else "a") as file:
        for i, facts in enumerate(columns["episode_facts"]):
            if facts is not None:
                own = {name: columns[name][i] for name in ("uid", "episode_id", "data_source")}
                own |= {name: int(columns[name][i]) for name in ("agent_index", "env_seed")}
                entries = {"step": meta["global_steps"], **own, **facts}
                file.write(strict_json(entries | entries.pop("record")) + "\n")


def readable_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Yields each scored row as text: `uid`, `input`, `output` and `score`."""
    batch = batch.drop_dummies()
    prompts, responses = batch.batch["prompts"], batch.batch["responses"]
    width, mask = prompts.shape[1], batch.batch["attention_mask"].bool()
    for i, score in enumerate(batch.batch["token_level_scores"].sum(dim=1).tolist()):
        read = tokenizer.decode(prompts[i][mask[i, :width]])
        written = tokenizer.decode(responses[i][mask[i, width:]])
        yield {
            "uid": batch.non_tensor_batch["uid"][i],
            "input": read,
            "output": written,
            "score": score,
        }


def strict_json(entries: Mapping[str, Any]) -> str:
    """Writes one line of JSON; numbers that are not finite become null, objects that JSON has not become text."""
    try:
        return json.dumps(entries, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(
            json.loads(json.dumps(entries, default=str), parse_constant=lambda _: None)
        )


class EnvironmentsFail(RuntimeError):
    """Ends a run whose environments do not give what a run can learn from; says which, and the fix."""


def require_same_tasks(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raises EnvironmentsFail where a group's members, who had the same seed, began with different messages."""
    begins: dict[tuple[int, int], set[str]] = defaultdict(set)
    for fact in (fact for fact in facts if fact["begins"]):
        begins[fact["group"], fact["environment"]].add(fact["begins"])
    if wrong := [key for key, hashes in begins.items() if len(hashes) > 1]:
        raise EnvironmentsFail(
            say("begins_differ", name=names[wrong[0][1]], wrong=len(wrong), groups=len(begins))
        )


class FailureWatch:
    """Ends a run whose environments fail: in more than `limit` of the attempts of the last three steps."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._steps: deque[tuple[int, int]] = deque(maxlen=3)

    def check(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Counts a step's attempts. Raises EnvironmentsFail, with the first error."""
        tried = sum(fact["attempts"] for fact in facts)
        ended_well = sum(fact["ending"] not in ("env_crash", "env_timeout") for fact in facts)
        self._steps.append((tried - ended_well, tried))
        failed, tries = (sum(column) for column in zip(*self._steps, strict=True))
        if len(self._steps) == 3 and failed > self.limit * tries:
            error = next((fact["error"] for fact in facts if fact["error"]), "")
            raise EnvironmentsFail(
                say("too_many_fail", failed=failed, tries=tries, limit=self.limit, error=error)
            )


def episode_metrics(
    facts: Sequence[Mapping[str, Any]], names: Sequence[str] = ("environment",)
) -> dict[str, float]:
    """Counts a step's endings, turns, environment time and tool calls; for several environments also of each.

    `agent/ending/NAME` count episodes by their last attempt, `agent/retries` the attempts before it; `agent/masked` and
    `agent/masked_groups` count what is not trained on; seconds are wall time, means over episodes or calls;
    `agent/info/NAME/mean` is that of the last number of that name that an episode's steps gave in their info;
    `tool/NAME/failures` count every call that gave an error, by kind under `tool_failures/KIND`.
    """
    endings = Counter(fact["ending"] for fact in facts)
    metrics: dict[str, float] = {f"ending/{name}": endings[name] for name in ENDINGS}
    metrics |= {"episodes": len(facts), "failed": sum(endings[name] for name in FAILURES)}
    metrics |= {name: sum(fact[name] for fact in facts) for name in ("cut_turns", "masked")}
    metrics["retries"] = sum(fact["attempts"] - 1 for fact in facts)
    metrics["masked_groups"] = sum(
        all(fact["masked"] for fact in group) for group in by_group(facts)
    )
    metrics["episode_seconds/max"] = max(fact["seconds"] for fact in facts)
    told = {name: [fact[name] for fact in facts] for name in ("turns", "env_seconds")}
    metrics |= {f"{name}/max": max(values) for name, values in told.items()}
    for fact in facts:
        for name, value in fact["info"].items() if not fact["masked"] else ():
            told.setdefault(f"info/{name}", []).append(value)
    metrics |= {f"{name}/mean": np.mean(values) for name, values in told.items()}
    metrics = {f"agent/{name}": float(value) for name, value in metrics.items()}
    if len(names) > 1:
        metrics |= environment_metrics(facts, names)
    if errors := [fact["error"] for fact in facts if fact["error"]]:
        # With its traceback.
        warn_once(__name__, f"an environment failed: {errors[0]}")
        logger.warning(say("some_fail", count=len(errors), first=errors[0].splitlines()[0]))
    warn_of_crashing_groups(facts, names)
    return metrics | tool_metrics([call for fact in facts for call in fact["tool_calls"]])


def environment_metrics(
    facts: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, float]:
    """Gives for each environment its episodes, their mean reward (masked ones left out), turns and failures."""
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        own = [fact for fact in facts if fact["environment"] == index]
        metrics[f"env/{name}/episodes"] = float(len(own))
        if own:
            metrics[f"env/{name}/failed"] = float(sum(fact["ending"] in FAILURES for fact in own))
        told = {"turns": own, "reward": [fact for fact in own if not fact["masked"]]}
        metrics |= {
            f"env/{name}/{key}": float(np.mean([f[key] for f in rows]))
            for key, rows in told.items()
            if rows
        }
    return metrics


def by_group(facts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Lists the groups' episodes."""
    return [
        [facts[i] for i in members]
        for members in rows_by_key(fact["group"] for fact in facts).values()
    ]


def warn_of_crashing_groups(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Warns of groups whose members crash while others' do not: an action may be what crashes them.

    Such a crash is played again or masked, and so goes unpunished.
    """
    groups = by_group(facts)
    crashes = [
        sum(fact["attempts"] - (fact["ending"] != "env_crash") for fact in group)
        for group in groups
    ]
    attempts = [sum(fact["attempts"] for fact in group) for group in groups]
    for group, own, tries in zip(groups, crashes, attempts, strict=True):
        rest, of = sum(crashes) - own, sum(attempts) - tries
        if len(group) > 1 and own >= 2 and of and own / tries > 4 * max(rest / of, 1 / of):
            name, number = names[group[0]["environment"]], group[0]["group"]
            logger.warning(
                say(
                    "group_crashes",
                    name=name,
                    group=number,
                    crashes=own,
                    tries=tries,
                    rest=rest,
                    of=of,
                )
            )


def tool_metrics(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Counts calls, failures and seconds of each tool; calls that name no tool, or an invented one, as `unknown`."""
    invented = [call["error_kind"] == "unknown_tool" or call["name"] == UNKNOWN for call in calls]
    names = (
        "unknown" if unknown else call["name"]
        for call, unknown in zip(calls, invented, strict=True)
    )
    metrics: dict[str, float] = {}
    for name, members in rows_by_key(names).items():
        own = [calls[i] for i in members]
        metrics[f"tool/{name}/calls"] = float(len(own))
        metrics[f"tool/{name}/failures"] = float(sum(not call["ok"] for call in own))
        metrics[f"tool/{name}/seconds"] = float(np.mean([call["seconds"] for call in own]))
    failures = Counter(call["error_kind"] for call in calls if not call["ok"])
    return metrics | {f"tool_failures/{kind}": float(count) for kind, count in failures.items()}
