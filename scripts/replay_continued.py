"""Plays a recorded episode again up to a turn, and goes on from there with a model.

Turns before that one are answered with the recorded ids, by a fresh environment; the turn itself,
and those behind it, are sampled with transformers. Invariant: the turn loop, the agents and the way
of sampling are those of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from scripts.replay_episodes import Recorded, as_read
from scripts.replay_player import Player, describe, sampled_turns
from training.config import PPOConfig
from training.run.checkpoint_contents import ACTOR
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec, torch_dtype
from workers.multi_turn_rollout import AgentRollout
from workers.rollout.engine import Completion, Sampling
from workers.weight_sync.manifest import iter_weights, weight_manifest

Report = Callable[[str], None]


class ContinuingEngine(HFRollout):
    """Answers an episode's first turns with the record's ids, and samples all further ones.

    Args:
        lm: the model that samples.
        episode: which is played alone.
        recorded_turns: so many are answered from the record.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: ModelSpec,
        lm: nn.Module,
        episode: Recorded,
        recorded_turns: int,
    ) -> None:
        super().__init__(config.resolved_rollout, model)
        dtype = torch_dtype(config.actor_rollout_ref.rollout.dtype)
        self.update_weights(iter_weights(lm, dtype), weight_manifest(lm))
        self.recorded = self._first_turns(episode, recorded_turns)
        self.answered: list[Completion] = []

    @staticmethod
    def _first_turns(episode: Recorded, count: int) -> Iterator[Completion]:
        for _, completion in zip(range(count), sampled_turns("0", episode), strict=False):
            yield completion

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Takes the next recorded turn as the answer, or queues the request."""
        recorded = next(self.recorded, None)
        if recorded is None:
            super().submit(request_id, prompt_ids, sampling)
        else:
            self.answered.append(Completion(**{**vars(recorded), "request_id": request_id}))

    def step(self) -> list[Completion]:
        """Returns recorded answers, and completes what is to be sampled."""
        answered = self.answered
        self.answered = []
        return answered + super().step()


def config_words_of(model: Path | None) -> list[str]:
    """Returns the settings by which a config takes this model; none for its own.

    Args:
        model: a Hugging Face folder, or a run's global_step_N.

    Raises:
        ValueError: it is neither.
    """
    if model is None:
        return []
    if (model / "config.json").exists():
        return [f"actor_rollout_ref.model.path={model}"]
    if (model / ACTOR / "model").is_dir():
        return ["actor_rollout_ref.actor.checkpoint.load_contents=[model]"]
    raise ValueError(
        f"--model {model} is no model: give a Hugging Face folder (with config.json), or a "
        "checkpoint of the run, RUN_DIR/global_step_N"
    )


def load_model(config: PPOConfig, model: Path | None) -> nn.Module:
    """Loads the config's model, with the weights of `model` where that is a checkpoint."""
    worker = ActorRolloutRefWorker(config, "actor")
    worker.init_model(1, config.batch_plan)
    if model is not None and (model / ACTOR / "model").is_dir():
        worker.load_checkpoint(str(model / ACTOR))
    return worker.actor.actor_module.lm


def require_turn(episode: Recorded, until_turn: int) -> None:
    """Raises ValueError where an episode has no such turn, the first being 1, to go on from."""
    turns = len(episode["turns"])
    if not 1 <= until_turn <= turns + 1:
        raise ValueError(
            f"--until-turn {until_turn}: episode {episode['episode_id']} has the turns 1 to "
            f"{turns}; give one of them, or {turns + 1} to go on behind the last"
        )


def play_on(player: Player, lm: nn.Module, episode: Recorded, until_turn: int) -> Recorded:
    """Plays the episode, from turn `until_turn` on, the first being 1, with the model.

    Returns: its record.

    Raises:
        ValueError: the episode has fewer turns before it.
    """
    require_turn(episode, until_turn)
    engine = ContinuingEngine(player.config, player.model, lm, episode, until_turn - 1)
    specs = [player.specs[episode["agent_index"] % len(player.specs)]]
    rollout = AgentRollout(player.config, engine, player.model.tokenizer, specs, None)
    with closing(rollout):
        batch = rollout.run(describe(player.config, [episode]))
    facts: dict[str, Any] = batch.non_tensor_batch["episode_facts"][0]
    played = as_read(facts["ending"], json.loads(facts["record"]))
    return {**played, "reward": facts["reward"], "error": facts["error"]}


def tell_conversation(
    episode: Recorded, played: Recorded, until_turn: int, report: Report = print
) -> None:
    """Prints a conversation: what is of the record, and how it went on.

    Of a program it is what each request says that is new: it may have several conversations.
    """
    is_program = any(
        turn.get("asked") is not None and not turn.get("writes") for turn in played["turns"]
    )
    if not is_program:
        _tell_messages(played["initial_messages"], report)
    for number, turn in enumerate(played["turns"], start=1):
        is_recorded = number < until_turn
        recorded = episode["turns"][number - 1] if is_recorded else turn
        if is_program:
            _tell_request(number, turn, report)
            if turn["asked"] != recorded["asked"]:
                report(f"(in the record turn {number} was asked otherwise)")
        if turn.get("writes"):
            _tell_messages(turn["asked"], report)
        source = "record" if is_recorded else "model"
        report(f"[turn {number}, {source}] assistant: {turn['text']}")
        if is_program:
            continue
        _tell_messages(turn["observation"], report)
        if turn["observation"] != recorded["observation"]:
            report(f"(in the record turn {number} was answered otherwise)")
    report(
        f"{played['ending']} after {len(played['turns'])} turns, reward {played['reward']:g}; "
        f"the record: {episode['ending']} after {len(episode['turns'])} turns, reward "
        f"{episode.get('reward', 0.0):g}"
    )


def _tell_messages(messages: Iterable[Mapping[str, Any]], report: Report) -> None:
    for message in messages:
        report(f"{message['role']}: {message.get('content', '')}")


def _tell_request(number: int, turn: Recorded, report: Report) -> None:
    """Prints what a program's request says that is new, and behind which turn it goes on.

    The record's `behind` counts from 0, `number` and what is said from 1.
    """
    if turn["behind"] is None and number > 1:
        report("(a conversation begins)")
    elif turn["behind"] not in (None, number - 2):
        report(f"(goes on behind turn {turn['behind'] + 1})")
    _tell_messages(turn["asked"] or [], report)
