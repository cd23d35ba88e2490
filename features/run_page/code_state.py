"""Says with which code a run was made: a digest of the project's files and of the user's.

Runs of equal settings whose code differs are no repetitions of each other: people edit the project
in place. `code.diff` in the run's folder is what git says differs from the commit.
"""

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.config.section import PROJECT_ROOT

# The project's folders whose code a run may go through.
FOLDERS = ("training", "workers", "data", "custom", "features", "setup")
DIGEST_CHARS = 12
# The file in the run's folder.
DIFF = "code.diff"
MOST_DIFF_BYTES = 1 << 20
GIT_S = 5.0


def code_digest(settings: Mapping[str, Any], project: Path = PROJECT_ROOT) -> str:
    """Returns a digest of the code that a run goes through, as hexadecimal digits.

    Args:
        settings: the run's, by dotted key; files of Python that they name count as well.
        project: the folder of the project.
    """
    found = hashlib.sha256()
    for name, file in [*_project_files(project), *_named_files(settings)]:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        found.update(f"{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:DIGEST_CHARS]


def _project_files(project: Path) -> Iterator[tuple[str, Path]]:
    """Yields the project's files of Python, each behind its name, in order."""
    files = [project / "main.py"]
    for folder in FOLDERS:
        files += sorted((project / folder).rglob("*.py"))
    for file in files:
        yield str(file.relative_to(project)), file


def _named_files(settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yields the files of Python that settings name, as FILE.py or FILE.py:NAME, by their keys."""
    for key, value in sorted(settings.items()):
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            file = Path(text.partition(".py:")[0] + ".py" if ".py:" in text else text)
            if file.suffix == ".py" and file.is_file():
                yield f"{key}={file.name}", file


def write_diff(run_dir: Path, project: Path = PROJECT_ROOT) -> None:
    """Writes what differs from the commit beside the run; nothing where nothing does, or no git."""
    text = git(project, "diff", "HEAD")
    target = run_dir / DIFF
    if text.strip():
        target.write_text(text[:MOST_DIFF_BYTES], encoding="utf-8")
    else:
        target.unlink(missing_ok=True)


def git(folder: Path, *words: str) -> str:
    """Returns what git says of a repository's folder; "" where there is none, or no git."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
