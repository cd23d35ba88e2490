"""One episode of verifiers' environment, and what it tells of itself by its last line.

It runs in verifiers' interpreter. Invariant: an episode that verifiers calls failed ends with an
exit code and its errors; of any other each agent's conversation is reported with its own reward,
and nothing else is on standard output.
"""

import asyncio
import json
import os
import sys
from statistics import fmean
from typing import Any

from features.programs.with_verifiers.world import World, agents_of, client_of, world

# So much of an error is shown.
MAX_ERROR_CHARS = 2000


def main() -> int:
    """Plays the episode of SEED; returns the exit code."""
    # The output of tasks, and of all that they start, is no report: it goes to standard error.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        loaded = world()
    # Whatever a taskset raises as it is loaded.
    except Exception as error:
        print(f"the environment does not load: {described(error)}", file=sys.stderr)
        return 1
    minted: list[Any] = []
    episode = asyncio.run(play(loaded, int(os.environ["SEED"]), minted))
    if not episode.ok:
        for text in errors_of(episode):
            print(text[-MAX_ERROR_CHARS:], file=sys.stderr)
        return 1
    print(json.dumps(report(loaded, episode.traces, minted)), file=output, flush=True)
    return 0


async def play(loaded: World, seed: int, minted: list[Any]) -> Any:
    """Has verifiers run the episode, with the policy behind each agent that has no client.

    Args:
        minted: is given every trace that is begun, also those of attempts made again.
    """
    import verifiers.v1 as vf

    env = loaded.env
    base_url = os.environ["OPENAI_BASE_URL"]
    max_turns = loaded.settings["max_turns"]
    for name, spec in agents_of(env.config).items():
        if spec.client is None:
            update: dict[str, Any] = {"client": client_of(loaded, name, base_url)}
            if spec.max_turns is None:
                update["max_turns"] = max_turns
            setattr(env.config, name, spec.model_copy(update=update))
    context = vf.ModelContext(model="policy", client=client_of(loaded, "agent", base_url))
    [slot] = env.slots(loaded.row(seed))
    async with env.serving():
        return await env.run_slot(slot, context, on_trace=minted.append)


def report(loaded: World, traces: list[Any], minted: list[Any]) -> dict[str, Any]:
    """Returns what every conversation earned, and the mean of each metric.

    What was given up and tried again is no part of the episode, and not trained on.
    """
    chosen = loaded.settings["trained"]
    conversations: dict[str, Any] = {trace.id: {"trained": False} for trace in minted}
    for trace in traces:
        agent = trace.agent
        is_trained = agent.name in chosen if chosen else agent.trainable
        conversations[trace.id] = {"reward": trace.reward, "trained": is_trained}
    return {"conversations": conversations, "metrics": metrics_of(traces)}


def metrics_of(traces: list[Any]) -> dict[str, float]:
    """Returns the metrics and rewards of the traces, by AGENT/NAME where there are several."""
    several = len({trace.agent.name for trace in traces}) > 1
    values: dict[str, list[float]] = {}
    for trace in traces:
        prefix = f"{trace.agent.name}/" if several else ""
        named = dict(trace.metrics)
        for name, reward in trace.rewards.items():
            if reward is not None:
                named[f"reward_{name}"] = reward.value
        for name, value in named.items():
            if value is not None:
                values.setdefault(prefix + name, []).append(float(value))
    return {name: fmean(each) for name, each in values.items()}


def described(error: BaseException) -> str:
    """Writes an error with what caused it: a taskset that is not found may lack a package."""
    words = f"{type(error).__name__}: {error}"
    if error.__cause__ is None:
        return words
    return f"{words}; caused by {described(error.__cause__)}"


def errors_of(episode: Any) -> list[str]:
    """Lists an episode's errors, those of its agents first."""
    errors = []
    for trace in episode.traces:
        for error in trace.errors:
            errors.append(f"{trace.agent.name}: {error.type}: {error.message}")
    errors += [f"{error.type}: {error.message}" for error in episode.errors]
    return errors or ["verifiers calls the episode failed, and names no error"]
