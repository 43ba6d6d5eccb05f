"""What the doctor says: one finding a fault, named, with its cure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["ill", "warning"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the gravest first


@dataclass(frozen=True)
class Finding:
    """`name` is the diagnosis, the same wherever it is seen; `told` says what is wrong and where, `cure` what to do.

    `engines` are those whose loading it concerns; none means every loader.
    """

    name: str
    severity: Severity
    told: str
    cure: str
    engines: tuple[str, ...] = ()
