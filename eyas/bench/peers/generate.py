"""`peer:generate`: transformers' plain `generate`, greedy or sampling."""

from __future__ import annotations

from eyas.bench.peers.peer import Kind, Peer
from eyas.bench.peers.stock import StockPeer, version
from eyas.errors import EyasError
from eyas.target import Target


def open_generate(argument: str, target: Target, rows: int, length: int) -> Peer:
    """Raises EyasError when something follows the name."""
    if argument:
        raise EyasError(f"peer:generate takes nothing after its name, not '{argument}'")
    return StockPeer("peer:generate", target, rows, length, "transformers generate")


GENERATE = Kind(open_generate, version)
