"""`peer:lookup`: transformers' prompt look-up, which drafts what followed the last tokens where they stood before."""

from __future__ import annotations

from eyas.bench.peers.peer import Kind, Peer
from eyas.bench.peers.stock import StockPeer, version
from eyas.errors import EyasError
from eyas.target import Target

TOKENS = 10  # drafted a round, as transformers' own examples have it


def open_lookup(argument: str, target: Target, rows: int, length: int) -> Peer:
    """`argument` may be the number of tokens to draft. Raises EyasError when it is no such number."""
    if argument and not (argument.isdecimal() and int(argument)):
        raise EyasError(f"peer:lookup:{argument}: give a number of tokens to draft, e.g. peer:lookup:{TOKENS}")
    tokens = int(argument or TOKENS)
    how = f"transformers prompt look-up of {tokens} tokens"
    return StockPeer("peer:lookup", target, rows, length, how, {"prompt_lookup_num_tokens": tokens})


LOOKUP = Kind(open_lookup, version)
