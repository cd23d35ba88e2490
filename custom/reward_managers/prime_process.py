"""What a process of the prime reward manager runs.

Invariant: nothing here imports torch, as each of the processes would.
"""

import pickle
import traceback
from typing import Any

from data.loading import load_extern_object


def score_from_file(path: str, name: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Calls the function `name` of a file on a row's arguments.

    Returns ("", result), or what it raised, as text, and None: exceptions and results of any kind
    may not travel between processes.
    """
    try:
        result = load_extern_object(path, name)(**arguments)
        pickle.dumps(result)
    except BaseException as error:
        return f"{error!r}\n{traceback.format_exc(limit=-3)}", None
    return "", result
