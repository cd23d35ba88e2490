"""Reads the page that says what each alarm means."""

import re
from functools import cache
from pathlib import Path

from training.config.section import PROJECT_ROOT

# The page may lie in either place.
PAGES = (Path(__file__).with_name("README.md"), PROJECT_ROOT / "docs" / "alarms.md")


def page() -> Path | None:
    """Returns the page that says what each alarm means, where it is there."""
    return next((place for place in PAGES if place.is_file()), None)


@cache
def meanings() -> dict[str, str]:
    """Reads what the alarms' page says that each alarm means; nothing where it is not there."""
    place = page()
    if place is None:
        return {}
    found = {}
    for line in place.read_text(encoding="utf-8").splitlines():
        cells = line.split(" | ")
        if len(cells) == 2 and cells[0].startswith("| `"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = cells[1].removesuffix(" |").strip()
    return found
