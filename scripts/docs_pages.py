"""Writes the pages that `make docs` builds the site from: `python scripts/docs_pages.py OUT`.

    docs/                       as they are, but for links that leave docs/
    project/                    files outside docs/ that a page links to, as pages (docs_links.py)
    api/                        modules from their docstrings (docs_api.py); every setting and the
                                fields of a batch (docs_tables.py)
    site.css, iframe-worker/    how wide tables are shown; what the search needs in files

Invariant: pages of docs/ read well on a forge. What the site needs beyond them is made here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from scripts.docs_api import API_PAGES, api_page  # noqa: E402
from scripts.docs_links import linked_files, page_of, rewritten, source_page  # noqa: E402
from scripts.docs_tables import fields_table, settings_page  # noqa: E402

ASSETS = PROJECT / "scripts" / "docs_site"
# The first page is the navigation: beside it stands none.
WITHOUT_SIDEBARS = "---\nhide: [navigation, toc]\n---\n"


def write_pages(out: Path) -> None:
    """Writes every page of the site's source into `out`, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(PROJECT / "docs", out)
    shutil.copytree(ASSETS, out, dirs_exist_ok=True)
    for page in sorted((PROJECT / "docs").glob("*.md")):
        (out / page.name).write_text(rewritten(page))
    (out / "index.md").write_text(WITHOUT_SIDEBARS + rewritten(PROJECT / "docs" / "index.md"))
    for file in linked_files():
        text = rewritten(file) if file.suffix == ".md" else source_page(file)
        _write(out / page_of(file), text)
    for name, modules in API_PAGES.items():
        _write(out / "api" / f"{name}.md", api_page(name, modules))
    with (out / "api" / "dataproto.md").open("a") as page:
        page.write(fields_table())
    _write(out / "api" / "settings.md", settings_page())


def _write(path: Path, text: str) -> None:
    """Writes a page, and its folder where that is not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder to write to: python scripts/docs_pages.py outputs/docs_pages")
    write_pages(Path(sys.argv[1]))
