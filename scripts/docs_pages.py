"""Writes the pages that `make docs` builds the site from: `python scripts/docs_pages.py OUT`.

    docs/, features/            their pages as they are, but for links that lead to other places
    project/                    files outside docs/ that a page links to, as pages (docs_links.py)
    api/                        modules from their docstrings (docs_api.py); every setting and the
                                fields of a batch (docs_tables.py)
    OLD.html                    for each page that has moved, a page that leads to its place now
    site.css, iframe-worker/    how wide tables are shown; what the search needs in files

Invariant: pages of docs/ and features/ read well on a forge. Anything else that the
site needs is made here.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from scripts.docs_api import API_PAGES, api_page  # noqa: E402
from scripts.docs_links import (  # noqa: E402
    FEATURES,
    feature_pages,
    is_of_absent_feature,
    linked_files,
    page_of,
    rewritten,
    source_page,
)
from scripts.docs_tables import fields_table, settings_page  # noqa: E402

ASSETS = PROJECT / "scripts" / "docs_site"
# The first page is the navigation: beside it stands none.
WITHOUT_SIDEBARS = "---\nhide: [navigation, toc]\n---\n"
# Pages of docs/ that are no longer there, and the page that has their text.
MOVED = {
    "alarms": "features/alarms/README.md",
    "benchmarks_more": "docs/benchmarks.md",
    "chat": "features/chat/README.md",
    "episodes": "features/records/README.md",
    "evaluation": "features/evaluation/README.md",
    "export": "features/export/README.md",
    "gallery": "features/run_page/README.md",
    "mcp": "features/mcp/README.md",
    "metrics_checks": "docs/metrics.md",
    "metrics_engine": "docs/metrics.md",
    "programs": "features/programs/README.md",
    "programs_more": "features/programs/README.md",
    "python_parts": "docs/python.md",
    "run_page": "features/run_page/README.md",
    "scale": "docs/cluster.md",
    "trackers": "features/trackers/README.md",
    "troubleshooting_runs": "docs/troubleshooting.md",
    "verifiers": "features/programs/verifiers.md",
    "verl_names": "features/verl/names.md",
    "viewer": "features/viewer/README.md",
    "worlds": "features/adapters/README.md",
}
# The script keeps the anchor of an old link; without scripts the second line leads there.
REDIRECT = """<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={to}">
<title>This page has moved</title><link rel="canonical" href="{to}">
<script>location.replace("{to}" + location.hash)</script>
<p>This page has moved: <a href="{to}">{to}</a></p>
"""


def write_pages(out: Path) -> None:
    """Writes every page of the site's source into `out`, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(PROJECT / "docs", out)
    shutil.copytree(ASSETS, out, dirs_exist_ok=True)
    for page in sorted((PROJECT / "docs").glob("*.md")):
        (out / page.name).write_text(rewritten(page))
    for page in feature_pages():
        _write(out / page_of(page), rewritten(page))
    for picture in sorted(FEATURES.rglob("*.png")):
        _copy(picture, out / page_of(picture))
    _write_redirects(out)
    _write_absent_features(out)
    with (out / "features.md").open("a") as page:
        page.write(features_list())
    (out / "index.md").write_text(WITHOUT_SIDEBARS + rewritten(PROJECT / "docs" / "index.md"))
    for file in linked_files():
        text = rewritten(file) if file.suffix == ".md" else source_page(file)
        _write(out / page_of(file), text)
    for name, modules in API_PAGES.items():
        _write(out / "api" / f"{name}.md", api_page(name, modules))
    with (out / "api" / "dataproto.md").open("a") as page:
        page.write(fields_table())
    _write(out / "api" / "settings.md", settings_page())


def features_list() -> str:
    """Writes the list of the features that are here, a section of the page of features."""
    lines = ["\n## The features that are here"]
    for page in feature_pages():
        if page.name == "README.md":
            title = page.read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({page_of(page)})")
    return "\n".join(lines) + "\n"


def _write_absent_features(out: Path) -> None:
    """Writes a page for each that the navigation names and whose feature was deleted."""
    for name in re.findall(r"features/\S+\.md", (PROJECT / "mkdocs.yml").read_text()):
        if is_of_absent_feature(PROJECT / name):
            _write(out / name, "# Not here\n\nThe folder of this feature was deleted.\n")


def _write_redirects(out: Path) -> None:
    """Writes a page that leads on for each that has moved, but into no feature that is not here."""
    for old, now in MOVED.items():
        if (PROJECT / now).is_file():
            page = page_of(PROJECT / now).removesuffix(".md").replace("README", "index")
            _write(out / f"{old}.html", REDIRECT.format(to=f"{page}.html"))


def _copy(file: Path, place: Path) -> None:
    """Copies a file, and makes its folder where that is not there yet."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def _write(path: Path, text: str) -> None:
    """Writes a page, and its folder where that is not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder to write to: python scripts/docs_pages.py outputs/docs_pages")
    write_pages(Path(sys.argv[1]))
