"""`peer:assisted:MODEL`: transformers' assisted generation, in which a small model of the same tokens drafts."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from eyas.bench.peers.peer import Kind, Peer, files_hash
from eyas.bench.peers.stock import StockPeer, load_stock, version
from eyas.errors import EyasError
from eyas.locate import locate
from eyas.target import Target


def open_assisted(argument: str, target: Target, rows: int, length: int) -> Peer:
    """`argument` names the model that drafts, as --target does. Raises EyasError when it is missing or has other tokens."""
    location = _located(argument)
    assistant = load_stock(argument, target.dtype, target.device.type)
    if AutoTokenizer.from_pretrained(location).get_vocab() != target.tokenizer.get_vocab():
        raise EyasError(f"peer:assisted:{argument}: its tokens are not those of the target '{target.name}'; give its sibling")
    how = f"transformers assisted generation by {argument}"
    return StockPeer("peer:assisted", target, rows, length, how, {"assistant_model": assistant}, assistant)


def _located(argument: str) -> str:
    if not argument:
        raise EyasError("peer:assisted wants the model that drafts: peer:assisted:MODEL")
    return locate(argument)


def _weights(argument: str) -> str:
    folder = Path(_located(argument))
    return files_hash(folder.glob("*.safetensors")) or files_hash(folder.glob("*.bin"))


ASSISTED = Kind(open_assisted, version, weights=_weights)
