"""Checks that verifiers' environments can be played by verifiers; loads none of them.

Invariant: whatever file is named as its interpreter, the check ends, and what it started is gone.
"""

import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from custom.confine import kill_tree
from features.programs.checks import check_server
from features.programs.settings import ProgramsSettings
from training.config.schema.agent import EnvironmentChoice
from training.config.schema.ppo import PPOConfig

# The versions whose client and environments this project knows.
FIRST = (0, 4)
BEHIND = (0, 5)
# Seconds for an interpreter to name the version that it has, and the most it may write, in bytes.
MAX_S = 60.0
MAX_BYTES = 10_000
MAX_SAID_CHARS = 100
# The program that asks an interpreter; its last line is the answer.
ASK = """
import json
try:
    from importlib.metadata import version
    found = version("verifiers")
except ImportError:
    found = None
print(json.dumps({"verifiers": found}))
"""
HINT = "`make verifiers-env` makes one, .venv-verifiers/bin/python"


class Interpreter(NamedTuple):
    """Describes an interpreter that was asked.

    Attributes:
        version: of verifiers; None: it has none.
        fault: why it gave no answer; "": it did.
    """

    version: str | None = None
    fault: str = ""


def check_verifiers(
    key: str, choice: EnvironmentChoice, config: PPOConfig, own_data: bool
) -> Iterator[str]:
    """Requires an interpreter with verifiers, and settings that its episodes can have.

    Args:
        key: the section that names the environment.
    """
    programs = config.section(ProgramsSettings)
    yield from check_server(key)
    yield from python_refusals(str(programs.verifiers.python))
    if choice.prompt_template is not None:
        yield (
            f"{key}.prompt_template words what an adapter says; programs.verifiers.python has "
            "verifiers speak for itself: take one of them out"
        )
    if config.custom_reward_function.path is not None:
        yield (
            "custom_reward_function.path: episodes that verifiers plays have their task's own "
            "rewards; take it out, or programs.verifiers.python"
        )
    if programs.reward != "stdout":
        yield (
            f"programs.reward={programs.reward} is for programs.command; "
            "verifiers says itself what its episodes earn: take it out"
        )
    yield from _check_block(key, choice)


def _check_block(key: str, choice: EnvironmentChoice) -> Iterator[str]:
    """Requires that `kwargs.env`, verifiers' own block of settings, is one."""
    block = choice.kwargs.get("env", {})
    if not isinstance(block, dict):
        yield f"{key}.kwargs.env={block!r} must be a mapping: verifiers' settings under --env"
    elif "taskset" in block:
        yield f"{key}.kwargs.env.taskset: a taskset's settings stand in {key}.kwargs itself"


def python_refusals(python: str) -> Iterator[str]:
    """Requires that the interpreter runs, and has a version that fits."""
    key = f"programs.verifiers.python={python}"
    if shutil.which(python) is None:
        yield f"{key}: there is no such program; {HINT}"
        return
    version, fault = _asked(python)
    first, behind = (".".join(map(str, bound)) for bound in (FIRST, BEHIND))
    if fault:
        yield f"{key} {fault}; {HINT}"
    elif version is None:
        yield f"{key} has no verifiers; {HINT}"
    elif not FIRST <= _numbers(version) < BEHIND:
        yield f"{key} has verifiers {version}; {first} or newer, older than {behind}, fits: {HINT}"


@cache
def _asked(python: str) -> Interpreter:
    """Asks an interpreter which version of verifiers it has."""
    try:
        said = _output_of(python)
    except TimeoutError:
        return Interpreter(fault=f"did not answer within {MAX_S:g} s when asked for its packages")
    except OSError as error:
        return Interpreter(fault=f"does not run: {error.strerror}")
    try:
        version = json.loads(said.splitlines()[-1])["verifiers"]
    except (ValueError, IndexError, TypeError, KeyError):
        version = 0
    if isinstance(version, str | None):
        return Interpreter(version=version)
    end = " ".join(said.split())[-MAX_SAID_CHARS:].strip()
    return Interpreter(fault=f"is no Python: asked for its packages it said {end!r}")


def _output_of(python: str) -> str:
    """Returns what the interpreter writes, errors included, up to MAX_BYTES.

    Raises:
        TimeoutError: it wrote on, or nothing, for MAX_S.
        OSError: it cannot be started.
    """
    until = time.monotonic() + MAX_S
    # As its episodes do, it finds its own packages and none of this interpreter's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [python, "-c", ASK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            written = b""
            while len(written) < MAX_BYTES:
                left_s = until - time.monotonic()
                ready, _, _ = select.select([process.stdout], [], [], max(left_s, 0.0))
                if not ready and process.poll() is None:
                    raise TimeoutError
                if not ready:
                    # It has ended; what it started holds the pipe.
                    break
                block = os.read(process.stdout.fileno(), MAX_BYTES)
                if not block:
                    break
                written += block
        finally:
            kill_tree(process.pid)
    return written.decode("utf-8", "replace")


def _numbers(version: str) -> tuple[int, int]:
    """Returns a version's first two numbers."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None:
        return 0, 0
    return int(found[1]), int(found[2] or 0)
