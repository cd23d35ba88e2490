"""Serves a model to programs, without training: `python main.py CONFIG --serve MODEL`.

    --port N           of the server; 0, the default, is any that is free

It prints what a program's environment is to have, and then, of each episode, the rows as they would
be trained on: what was sampled stands in brackets. A POST to the printed address ends an episode
and begins the next; Ctrl-C ends all. MODEL is a Hugging Face folder, a checkpoint or a run's folder
(training/run/model_source.py). Invariant: turns, tokens, limits and rows are those of training.
"""

import argparse
import errno
import itertools
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from data.seeds import step_info
from data.turn_tokens import TurnTokens
from features.programs.opening import open_program_pool
from features.programs.play import player_of
from features.programs.pool import ProgramPool
from features.programs.settings import ProgramsSettings
from features.programs.spec import ProgramSpec
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config
from training.config.side_services import side_services
from training.run.model_source import CannotUse, local_model, reading_model, tokenizer_folder
from training.run.signals import EndingSignals
from workers.model.builder import ModelSpec, find_device
from workers.ranks import worker_process
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.episode import Episode, Row, TurnLimits
from workers.rollout.turn_loop import Batch, TurnLoop
from workers.rollout_building import build_rollout
from workers.turn_reading import turn_tokens, with_parser
from workers.weight_sync.manifest import iter_weights, weight_manifest

# One rank serves.
ONE_RANK = (
    "trainer.launcher=local",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.rollout_n_gpus=0",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.model.lora_rank=0",
    "actor_rollout_ref.rollout.lora_as_adapter=false",
    # A person takes their time.
    "agent.step_timeout_s=null",
    "agent.episode_timeout_s=null",
)
ENGINE = "actor_rollout_ref.rollout.name"
# Why a port cannot be listened at.
REFUSED_PORTS = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)


def serve_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Serves as the command line asks; returns the exit code.

    Raises:
        ConfigError: the words, or the configuration, are wrong.
    """
    parser = argparse.ArgumentParser(prog="python main.py CONFIG.yaml", allow_abbrev=False)
    parser.add_argument("--serve", required=True, metavar="MODEL")
    parser.add_argument("--port", type=int, default=0, metavar="N")
    args, words = parser.parse_known_args(argv)
    try:
        config = read_serving_config(args.serve, words)
        with serving_model(args.serve, config) as (model, engine):
            serve(config, model, engine, args.port)
    except CannotUse as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in REFUSED_PORTS:
            raise
        raise ConfigError([f"--port={args.port}: {error}"]) from error
    return 0


def read_serving_config(place: str, words: Sequence[str]) -> PPOConfig:
    """Reads the config for one rank that serves the model at this place."""
    own = [f"actor_rollout_ref.model.path={tokenizer_folder(place)}"]
    loaded = load_config([*words, *ONE_RANK, *own], check=False)
    if loaded.sources[ENGINE] == "default" and not torch.cuda.is_available():
        own.append(f"{ENGINE}=hf")
        loaded = load_config([*words, *ONE_RANK, *own], check=False)
    return loaded.config


@contextmanager
def serving_model(place: str, config: PPOConfig) -> Iterator[tuple[ModelSpec, BaseRollout]]:
    """Builds the engine with the model's weights."""
    device = find_device(config.trainer.device)
    worker_process.start_worker(device, deterministic=config.trainer.deterministic)
    dtype = config.actor_rollout_ref.rollout.dtype
    settings = replace(config.actor_rollout_ref.model, dtype=dtype)
    with local_model(place, dtype) as folder:
        with reading_model(place):
            spec = ModelSpec(settings, folder.path, device)
            engine = build_rollout(config.resolved_rollout, spec)
            lm = spec.causal_lm(trainable=False)
            engine.update_weights(iter_weights(lm, lm.dtype), weight_manifest(lm))
            del lm
        yield spec, engine


def serve(config: PPOConfig, model: ModelSpec, engine: BaseRollout, port: int) -> None:
    """Serves one episode after the other until Ctrl-C."""
    programs = config.section(ProgramsSettings)
    spec = ProgramSpec(
        parser=config.agent.parser,
        client_sampling=programs.client_sampling,
        dropped_thinking=programs.dropped_thinking,
        train_models=programs.train_models,
        helper_prompts=programs.helper_prompts,
        request_timeout_s=programs.request_timeout_s,
        token=secrets.token_urlsafe(24),
        # Nothing is written to the run's folder.
        services=side_services(config, writes=False),
    )
    tokens = turn_tokens(config, model.tokenizer, engine.eos_token_ids)
    [spec] = with_parser([spec], tokens)
    with open_program_pool(config, {0: spec}, engine.max_model_len, port=port) as pool:
        player = player_of(spec)
        loop = TurnLoop(
            engine, tokens=tokens, environments=pool, tools=[None], programs={0: player}
        )
        served = Served(config, engine, tokens, loop)
        greet(pool, str(spec.token))
        try:
            for number in itertools.count():
                served.play(number)
        except KeyboardInterrupt:
            served.show()


@dataclass
class Served:
    """Plays the episodes that are served, and shows their rows.

    Attributes:
        episode: the one that is played.
    """

    config: PPOConfig
    engine: BaseRollout
    tokens: TurnTokens
    loop: TurnLoop
    episode: Episode | None = None

    def play(self, number: int) -> None:
        """Plays an episode to its end, and shows it."""
        self.episode = Episode(group=number, sample=0)
        info = step_info(step=0, seed=self.config.data.run_seed)
        limits = TurnLimits(
            prompt_length=self.config.data.max_prompt_length,
            response_length=self.engine.response_length,
            max_model_len=self.engine.max_model_len,
            max_turn=self.config.agent.max_turn,
            max_turn_tokens=self.config.agent.max_turn_tokens,
        )
        self.loop.run(Batch([self.episode], self.engine.sampler(info), [limits]))
        self.show()

    def show(self) -> None:
        """Prints the rows of the episode, as far as it was played."""
        episode = self.episode
        if episode is None or not episode.turns:
            return
        reward = sum(sum(row.reward_at.values()) for row in episode.rows)
        print(
            f"\nepisode {episode.group}: {episode.ending or 'not ended'}, "
            f"{len(episode.turns)} turns, reward {reward:g}"
        )
        for number, row in enumerate(episode.rows):
            print(f"--- row {number}: {describe(row)}\n{self.text_of(row)}", flush=True)

    def text_of(self, row: Row) -> str:
        """Returns a row as text, with what was sampled in brackets."""
        decode = self.tokens.tokenizer.decode
        ids = row.ids.tolist()
        parts = [decode(row.prompt_ids)]
        end = 0
        for span in row.spans:
            parts.append(decode(ids[end : span.start]))
            parts.append(f"[[{decode(ids[span.start : span.end])}]]")
            end = span.end
        return "".join([*parts, decode(ids[end:])])


def describe(row: Row) -> str:
    """Counts the tokens of a row."""
    sampled = sum(span.end - span.start for span in row.spans)
    return f"{len(row.prompt_ids)} of prompt, {len(row.ids)} behind it, {sampled} trained on"


def greet(pool: ProgramPool, token: str) -> None:
    """Prints how programs reach the policy, and how an episode ends."""
    url = pool.url(token)
    print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={token}")
    print(f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={token}")
    print(f"""an episode ends by: curl -d '{{"reward": 1}}' {url}/end""", flush=True)
