"""Other decoders as contestants of a race, run as their own users run them."""

from eyas.bench.peers.opening import open_peer, peer_engine, peer_weights, require_able
from eyas.bench.peers.peer import Peer

__all__ = ["Peer", "open_peer", "peer_engine", "peer_weights", "require_able"]
