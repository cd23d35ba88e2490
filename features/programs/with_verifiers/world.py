"""The environment that verifiers plays in: loaded once, from the settings in the environment.

It runs in verifiers' interpreter. Invariant: a row is chosen by the seed alone; nothing runs code
that a model wrote on this machine unless the settings say so.
"""

import asyncio
import itertools
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

# The name of the variable that holds the settings, as JSON.
SETTINGS = "VERIFIERS_SETTINGS"
# Rows that are read of a taskset without an end.
INFINITE_ROWS = 1000
# The renderer that renders by the run's chat template.
RUN_RENDERER = "features.programs.with_verifiers.run_renderer.RunRenderer"


@dataclass(frozen=True)
class World:
    """Holds what is loaded.

    Attributes:
        settings: of the run, as `spec.settings_of` makes them.
        env: verifiers' environment.
        rows: its tasks; None: it has no end.
        renderer: the config of what renders messages.
    """

    settings: dict[str, Any]
    env: Any
    rows: list[Any] | None
    renderer: Any

    def row(self, seed: int) -> Any:
        """Returns the task of a seed: seed % number of rows."""
        if self.rows is not None:
            return self.rows[seed % len(self.rows)]
        number = seed % INFINITE_ROWS
        return next(itertools.islice(self.env.taskset, number, None))


@cache
def world() -> World:
    """Loads the environment.

    Raises:
        ValueError: the taskset has no rows, or an agent would run code on this machine.
    """
    import verifiers.v1 as vf

    settings = json.loads(os.environ[SETTINGS])
    # Scripts that verifiers runs are set up by uv, which is installed beside it.
    beside = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    block = settings["env"]
    config = vf.resolve_env_config(block)
    for name, spec in agents_of(config).items():
        is_given = "runtime" in (block.get(name) or {})
        if isinstance(spec.runtime, vf.PrimeConfig) and not is_given:
            check_harness(name, config.agent_harnesses()[name])
            setattr(config, name, spec.model_copy(update={"runtime": vf.SubprocessConfig()}))
    env = vf.load_environment(config)
    rows = None
    if env.taskset.bounded:
        rows = list(env.taskset)
        if not rows:
            raise ValueError(f"the taskset {config.taskset.id} has no rows")
    return World(settings, env, rows, renderer_of(settings))


def env_block(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns verifiers' own settings of an environment, what it has under `--env`.

    Args:
        name: verifiers:TASKSET.
        kwargs: the taskset's settings, but for `env`: all others.
    """
    block = dict(kwargs.get("env") or {})
    taskset = {key: value for key, value in kwargs.items() if key != "env"}
    block["taskset"] = {"id": name.partition(":")[2], **taskset}
    return block


def agents_of(config: Any) -> dict[str, Any]:
    """Returns the configs of an environment's agents, by name."""
    from verifiers.v1.configs.agent import agent_config_fields

    return agent_config_fields(config)


def check_harness(agent: str, config: Any) -> None:
    """Raises ValueError where a harness runs a model's code, and nobody has said where."""
    import verifiers.v1 as vf

    if vf.load_harness(config).EXECUTES_CODE:
        raise ValueError(
            f"the harness {config.id} of the agent {agent} runs what the model writes: say where, "
            f"by kwargs.env.{agent}.runtime.type=docker (or subprocess: on this machine, without "
            f'walls), or take another harness, such as kwargs.env.{agent}.harness.id="null"'
        )


def renderer_of(settings: dict[str, Any]) -> Any:
    """Returns the config of what makes ids of messages."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    chosen = settings["renderer"]
    if chosen is None:
        names = ("template_kwargs", "eos_token_ids", "parser")
        chosen = {"name": "custom", "import_path": RUN_RENDERER}
        chosen |= {name: settings[name] for name in names}
    return TypeAdapter(RendererConfig).validate_python(chosen)


def prepare() -> None:
    """Loads all that episodes need, before they are forked from here."""
    try:
        loaded = world()
        asyncio.run(_warm(loaded))
    # An episode that needs it says what is wrong.
    except Exception:
        world.cache_clear()


async def _warm(loaded: World) -> None:
    """Loads the tokenizer, and sets up the harnesses that run on this machine."""
    import verifiers.v1 as vf
    from verifiers.v1.clients.train import ElasticRendererPool
    from verifiers.v1.runtimes import make_runtime

    client = client_of(loaded, "", "http://127.0.0.1/v1")
    if isinstance(client, vf.TrainClientConfig):
        pool = ElasticRendererPool(
            client.renderer_model_name, client.renderer, multiplex=client.multiplex
        )
        await pool.grow()
    for name, config in loaded.env.config.agent_harnesses().items():
        if not isinstance(agents_of(loaded.env.config)[name].runtime, vf.SubprocessConfig):
            continue
        runtime = make_runtime(vf.SubprocessConfig())
        await runtime.start()
        try:
            await vf.load_harness(config).setup(runtime)
        finally:
            await runtime.stop()


def client_of(loaded: World, agent: str, base_url: str) -> Any:
    """Returns the config of verifiers' client with which an agent asks the policy."""
    import verifiers.v1 as vf

    asked = {"base_url": base_url, "api_key_var": "OPENAI_API_KEY", "headers": {"X-Agent": agent}}
    if loaded.settings["client"] == "chat":
        return vf.EvalClientConfig(**asked)
    return vf.TrainClientConfig(
        **asked,
        renderer=loaded.renderer,
        renderer_model_name=loaded.settings["tokenizer"],
    )
