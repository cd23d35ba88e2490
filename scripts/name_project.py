"""Makes the project's packages importable from any folder by the Python that runs this.

    .venv/bin/python scripts/name_project.py     # scripts/setup_env.sh does it

So `python -m features.viewer.command RUN` works from a folder of one's own, too. A file of the
environment's site-packages names the project's folder; it comes behind the current folder and
PYTHONPATH. `pip install -e` instead would lose to a folder `data` there.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
NAME = "ppo_core.pth"


def main() -> None:
    """Writes the file."""
    packages = Path(sysconfig.get_path("purelib"))
    (packages / NAME).write_text(f"{PROJECT}\n")


if __name__ == "__main__":
    main()
