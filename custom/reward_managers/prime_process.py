"""Runs in a process of the prime reward manager.

Invariant: nothing here imports torch, as each of the processes would.
"""

import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from custom.confine import die_with_parent
from custom.coroutines import finished
from custom.model_errors import ModelError
from custom.model_usage import USAGE, Counts
from custom.reward_managers.unscored import Unscored
from custom.side_services import SideService, set_up_services
from data.loading import load_extern_object
from data.texts import text_of


class Scored(NamedTuple):
    """Holds what came of a row.

    Attributes:
        failure: what the function raised, as text; empty where it returned.
        result: what it returned.
        usage: what it asked of models.
    """

    failure: str
    result: Any
    usage: Counts


def begin_process(services: Sequence[SideService]) -> None:
    """Begins a process that scores rows: it ends with its parent, and may ask these services."""
    die_with_parent()
    set_up_services(services)


def score_from_file(path: str, name: str, arguments: dict[str, Any]) -> Scored:
    """Calls the function `name` of a file on a row's arguments.

    What it raises comes back as text: exceptions and results of any kind may not travel between
    processes.
    """
    try:
        result = finished(load_extern_object(path, name)(**arguments))
        pickle.dumps(result)
    except ModelError as error:
        return Scored("", Unscored(str(error)), USAGE.take())
    except BaseException as error:
        text = f"{text_of(error, repr)}\n{traceback.format_exc(limit=-3)}"
        return Scored(text, None, USAGE.take())
    return Scored("", result, USAGE.take())
