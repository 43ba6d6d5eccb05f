"""Peers by what a command line calls them."""

from __future__ import annotations

from collections.abc import Callable

from eyas.bench.figures import PEER
from eyas.bench.peers.assisted import open_assisted
from eyas.bench.peers.generate import open_generate
from eyas.bench.peers.llamacpp import open_llamacpp
from eyas.bench.peers.lookup import open_lookup
from eyas.bench.peers.openvino import open_openvino
from eyas.bench.peers.peer import Peer
from eyas.errors import EyasError
from eyas.target import Target

PEERS: dict[str, Callable[[str, Target, int, int], Peer]] = {
    "generate": open_generate,
    "lookup": open_lookup,
    "assisted": open_assisted,
    "openvino": open_openvino,
    "llamacpp": open_llamacpp,
}


def open_peer(source: str, target: Target, rows: int, length: int) -> Peer:
    """The peer called `source` (peer:generate, peer:lookup[:TOKENS], peer:assisted:MODEL, peer:openvino:FOLDER,
    peer:llamacpp:FOLDER) for the model of `target`: `rows` requests together where it can, texts of up to `length` tokens.

    Raises EyasError, in one line, when there is no such peer, when it is not installed, and when its model is missing.
    """
    kind, _, argument = source.removeprefix(PEER).partition(":")
    if kind not in PEERS:
        raise EyasError(f"no peer '{source}'; there are: {', '.join(PEER + name for name in PEERS)}")
    return PEERS[kind](argument, target, rows, length)
