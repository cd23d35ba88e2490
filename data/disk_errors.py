"""Tells the system's errors on files as what they are, whichever library met them."""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.texts import text_of

# How libraries in Rust, such as tokenizers and safetensors, end the text of such an error.
NUMBERED = re.compile(r"\(os error (\d+)\)")
FILE_TOO_LARGE = os.strerror(errno.EFBIG)


@contextmanager
def as_os_errors(path: Path) -> Iterator[None]:
    """Raises OSError in place of an error of the block that has one of the system's for a reason.

    tokenizers raises a bare Exception, safetensors a SafetensorError.

    Args:
        path: what the block writes.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = NUMBERED.search(text_of(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def limit_reached(text: str) -> str:
    """Asks, of an error's text, whether the disk is full, or says which limit stands on files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if FILE_TOO_LARGE in text and limit != resource.RLIM_INFINITY:
        return f"files may have {limit:,} bytes here, see ulimit -f"
    return "is the disk full?"
