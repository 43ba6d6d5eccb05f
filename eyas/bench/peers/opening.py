"""Peers by what a command line calls them."""

from __future__ import annotations

from eyas.bench.figures import PEER
from eyas.bench.peers.assisted import ASSISTED
from eyas.bench.peers.generate import GENERATE
from eyas.bench.peers.llamacpp import LLAMACPP
from eyas.bench.peers.lookup import LOOKUP
from eyas.bench.peers.openvino import OPENVINO
from eyas.bench.peers.peer import Kind, Peer, require_understood
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.target import Target

PEERS = {"generate": GENERATE, "lookup": LOOKUP, "assisted": ASSISTED, "openvino": OPENVINO, "llamacpp": LLAMACPP}


def open_peer(source: str, target: Target, rows: int, length: int) -> Peer:
    """The peer called `source` (peer:generate, peer:lookup[:TOKENS], peer:assisted:MODEL, peer:openvino:FOLDER,
    peer:llamacpp:FOLDER) for the model of `target`: `rows` requests together where it can, texts of up to `length` tokens.

    Raises EyasError, in one line, when there is no such peer, when it is not installed, and when its model is missing.
    """
    kind, argument = _kind(source)
    return kind.open(argument, target, rows, length)


def peer_weights(source: str) -> str:
    """The hash of the weights that the peer `source` drafts with, "" without any. Raises EyasError like `open_peer`."""
    kind, argument = _kind(source)
    return kind.weights(argument)


def peer_engine(source: str) -> str:
    """What decodes for the peer `source`, and its version where it tells. Raises EyasError like `open_peer`."""
    return _kind(source)[0].engine()


def require_able(source: str, params: SamplingParams) -> None:
    """Raises EyasError when the peer `source` does not sample by `params` as eyas does."""
    kind, _ = _kind(source)
    require_understood(source, params, kind.understood)


def _kind(source: str) -> tuple[Kind, str]:
    """The kind of the peer `source`, and what is said behind it. Raises EyasError when there is no such peer."""
    name, _, argument = source.removeprefix(PEER).partition(":")
    if name not in PEERS:
        raise EyasError(f"no peer '{source}'; there are: {', '.join(PEER + known for known in PEERS)}")
    return PEERS[name], argument
