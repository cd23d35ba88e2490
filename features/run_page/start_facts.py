"""Says how a process was started: its command, and the versions of what it runs."""

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from training.config.section import PROJECT_ROOT

PACKAGES = ("torch", "transformers", "vllm", "ray", "numpy")
MOST_COMMAND_CHARS = 4000
GIT_S = 5.0


def command_line() -> str:
    """Returns the command that started this process, as a shell takes it."""
    return shlex.join(sys.orig_argv)[:MOST_COMMAND_CHARS]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run depends on.

    Nothing is imported. `commit` is the project's, where its folder is a git repository; -dirty
    says that files differ from it.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = git_commit(PROJECT_ROOT)
    if commit:
        found["commit"] = commit
    return found


def git_commit(folder: Path) -> str:
    """Returns the commit of a repository's folder; "" where there is none, or no git."""
    if not (folder / ".git").exists():
        return ""
    describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    command = ["git", "-C", str(folder), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
