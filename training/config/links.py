"""Reads links to other keys in the text of a value: ${a.b}, ${.b}, ${oc.select:a.b,default}."""

import re
from collections.abc import Callable
from typing import Any

# A link's beginning, and the key that it names.
_LINK = re.compile(r"(\$\{(?:oc\.select:\s*)?)(\.*)([A-Za-z_][\w.]*)(?=\s*[},])")


def own_links(value: Any, key: str, new_name: Callable[[str], str]) -> Any:
    """Rewrites links in the text of a key's value: from the top, and by the names that are here.

    For the key a.b.c, ${.d} is a.b.d and ${..d} is a.d.
    """
    if not isinstance(value, str) or "${" not in value:
        return value

    def rewrite(link: re.Match[str]) -> str:
        beginning, dots, target = link.groups()
        if dots:
            section = key.split(".")[: -len(dots)]
            target = ".".join([*section, target])
        return beginning + new_name(target)

    return _LINK.sub(rewrite, value)


def links_to(value: Any, key: str) -> bool:
    """Checks whether a value is a link to the key and nothing else."""
    link = _LINK.match(value) if isinstance(value, str) else None
    return link is not None and link[3] == key
