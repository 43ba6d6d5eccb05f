"""The one way eyas says no: a single line that tells what is wrong, where, and what to do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class EyasError(Exception):
    """A fault the user can mend. The command line prints its message as one line and exits with code 2.

    Everything else that escapes is a bug in eyas and shows its traceback.
    """


def why_not_written(error: Exception) -> str:
    """The reason, in a few words, why a file could not be written."""
    told = str(error)
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in told or "enforce fail" in told:
        return "the disk is full"
    return told.splitlines()[0] if told else type(error).__name__


def first_fault(error: ValidationError) -> str:
    """The first field that a pydantic model refuses, and why, in one line."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"
