"""What a race asks of a contestant that is no engine of ours, and what all of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from eyas.bench.race import Racer
from eyas.decoding.engine import Request, Result
from eyas.decoding.row import Finish
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.errors import EyasError
from eyas.files import sha256
from eyas.target import Target

UNDERSTOOD = frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "sample", "ignore_eos"})


class Peer(Racer, Protocol):
    """A racer with its own sampling: its tokens at temperature 0 are the target's up to near-ties, above it they are other
    draws of the same distribution. Its stats hold what it tells; what it does not tell is 0."""


@dataclass(frozen=True)
class Kind:
    """A kind of peer, known before one is opened; `argument` is what a command line says behind its name.

    open        (argument, target, rows, length) -> the peer
    engine      the name of what decodes and its version, as far as it can be known
    understood  the fields of `SamplingParams` that it takes as eyas does
    weights     argument -> hash of the weights it drafts with, "" where there are none
    """

    open: Callable[[str, Target, int, int], Peer]
    engine: Callable[[], str]
    understood: frozenset[str] = UNDERSTOOD
    weights: Callable[[str], str] = lambda argument: ""


def require_understood(name: str, params: SamplingParams, understood: frozenset[str] = UNDERSTOOD) -> None:
    """Raises EyasError when `params` ask for what a peer would not do as we do it: penalties, grammars, stop strings."""
    usual = SamplingParams()
    asked = [
        f"{f.name} {value}"
        for f in fields(SamplingParams)
        if f.name not in understood and (value := getattr(params, f.name)) != getattr(usual, f.name)
    ]
    if asked:
        raise EyasError(f"{name} does not take {', '.join(asked)} as eyas does; leave it out of a race against it")


def files_hash(files: Iterable[Path]) -> str:
    """12 hex digits naming the contents of `files`; "" where there are none."""
    digests = [sha256(path) for path in sorted(files)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12] if digests else ""


def result_of(
    request: Request, target: Target, ids: Sequence[int], rounds: Sequence[int], stats: Stats, eos: frozenset[int]
) -> Result:
    """A peer's answer as a race reads it, cut where it ends. `rounds` are the tokens that each forward of the target emitted,
    the prompt's own first; the last token of a round is the target's, those before it were drafted."""
    end = next((n for n, token in enumerate(ids, 1) if token in eos), len(ids))
    end = min(end, request.params.max_new_tokens)
    kept = list(ids[:end])
    accepted = [place < length - 1 for length in rounds for place in range(length)][:end]
    finish: Finish = "eos" if kept and kept[-1] in eos else "length"
    text = str(target.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return Result(request.id, len(request.ids), kept, accepted, text, finish, stats)


def counted(stats: Stats, rounds: Sequence[int], drafted: Sequence[int]) -> Stats:
    """`stats` with the counts of the target's forwards: forward i emitted `rounds[i]` tokens after `drafted[i]` drafts.

    The first one reads the prompt and yields the first token. Where it verified drafts as well, and emitted more than that
    token, the rest is a round, though not a forward of its own.
    """
    stats.requests = 1
    for emitted, offered in list(zip(rounds, drafted, strict=True))[1:]:
        stats.count_round(emitted=emitted, accepted=emitted - 1, drafted=offered, offered=offered)
    if rounds[0] > 1:
        stats.count_round(emitted=rounds[0] - 1, accepted=rounds[0] - 2, drafted=drafted[0], offered=drafted[0] - 1)
        stats.accepted += 1  # the first token was a draft too
    else:
        stats.drafted += drafted[0]
    stats.target_forwards = len(rounds)
    return stats
