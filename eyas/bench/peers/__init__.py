"""Other decoders as contestants of a race, run as their own users run them."""

from eyas.bench.peers.opening import PREFIX, open_peer
from eyas.bench.peers.peer import Peer

__all__ = ["PREFIX", "Peer", "open_peer"]
