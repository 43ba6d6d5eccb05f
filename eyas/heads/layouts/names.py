"""Names of a head's tensors. Ours are the authors': the first layer is `midlayer`; others call it `layers.0`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eyas.errors import EyasError

OURS, NUMBERED = "midlayer.", "layers.0."


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under our names. Raises EyasError when one is there under both."""
    both = sorted(name for name in tensors if name.startswith(NUMBERED) and OURS + name.removeprefix(NUMBERED) in tensors)
    if both:
        raise EyasError(f"the tensors '{both[0]}' and '{OURS}{both[0].removeprefix(NUMBERED)}' are the same one twice")
    return {_renamed(name, NUMBERED, OURS): tensor for name, tensor in tensors.items()}


def to_numbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of ours, the first layer called `layers.0`."""
    return {_renamed(name, OURS, NUMBERED): tensor for name, tensor in tensors.items()}


def spelling(tensors: dict[str, Tensor]) -> Callable[[str], str]:
    """How the file that holds `tensors` spells a name of ours."""
    numbered = any(name.startswith(NUMBERED) for name in tensors)
    return lambda name: _renamed(name, OURS, NUMBERED) if numbered else name


def _renamed(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(before) else name
