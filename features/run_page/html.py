"""Writes a page: one HTML file with its style, its script, the chart library and its content.

Invariant: nothing is loaded from elsewhere, which the page's content security policy sees to: it
runs the scripts of this file alone, by their hashes, and fetches nothing. The content is JSON in a
script element that is not run; no text in it can end that element.
"""

import base64
import hashlib
import html
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from features.shared import ELEMENTS

ASSETS = Path(__file__).with_name("assets")
LIBRARY = ASSETS / "uplot"
# In this order, behind `ELEMENTS`: each uses those before it.
SCRIPTS = (
    "parts.js",
    "curves.js",
    "colors.js",
    "axes.js",
    "chart_data.js",
    "hover.js",
    "chart.js",
    "time_line.js",
    "tables.js",
    "overview.js",
    "metric_search.js",
    "page.js",
)
TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{library_style}</style>
<style>{style}</style>
</head>
<body>
<noscript>This page draws its charts by a script, which this browser does not run.</noscript>
<script type="text/plain" id="license">{license}</script>
<script type="application/json" id="content">{content}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def _parts() -> dict[str, str]:
    """Reads what is the same on every page, with the policy that allows it."""
    code = [ELEMENTS.read_text(encoding="utf-8"), *(_asset(name) for name in SCRIPTS)]
    parts = {
        "library": _asset("uplot/uPlot.iife.min.js"),
        "script": '"use strict";\n' + "\n".join(code),
        "library_style": _asset("uplot/uPlot.min.css"),
        "style": _asset("page.css"),
        "license": _asset("uplot/LICENSE"),
    }
    scripts = " ".join(_hash_source(parts[name]) for name in ("library", "script"))
    styles = " ".join(_hash_source(parts[name]) for name in ("library_style", "style"))
    parts["policy"] = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'"
    )
    return parts


def _hash_source(text: str) -> str:
    """Names an inline element in a content security policy."""
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def as_json(content: Any) -> str:
    """Writes JSON that may stand in a script element: it is ASCII, without < > &.

    Raises:
        ValueError: it has a number that is not finite, which JSON has not.
    """
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def make_html(content: dict[str, Any]) -> str:
    """Returns the text of a page."""
    return TEMPLATE.format(
        **_parts(),
        title=html.escape(without_broken_characters(str(content["title"]))),
        content=as_json(content),
    )


def without_broken_characters(text: str) -> str:
    """Replaces what no UTF-8 can hold, as of a folder's name that is none."""
    return text.encode("utf-8", "replace").decode("utf-8")


def write_html(content: dict[str, Any], page: Path) -> None:
    """Writes a page so that who opens it meanwhile sees the old one or the new one.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    # A run and a command that watches it may write at the same time.
    temporary = page.with_name(f"{page.name}.{os.getpid()}.tmp")
    try:
        # A link that stands there would lead the page elsewhere.
        temporary.unlink(missing_ok=True)
        temporary.write_bytes(make_html(content).encode("utf-8"))
        temporary.replace(page)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
