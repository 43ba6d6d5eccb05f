"""The options that every command has which loads a target: written once, added to a command by `takes_target`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any

import typer

from eyas.errors import EyasError
from eyas.estimate import Consent
from eyas.target import Target


@dataclass(frozen=True)
class TargetChoice:
    """Which target, and how it is loaded: the values of the shared options."""

    spec: str = "smollm2"
    weights: str = "stock"
    dtype: str = "float32"
    device: str = "cpu"
    device_map: str | None = None
    taps: str | None = None

    def load(self, head_taps: tuple[int, ...] | None = None) -> Target:
        """The target, with the taps of `--taps`, else those that a head names. Raises EyasError when it cannot be loaded."""
        taps = _taps(self.taps) or head_taps
        return Target.load(
            self.spec, dtype=self.dtype, device=self.device, weights=self.weights, taps=taps, device_map=self.device_map
        )  # fmt: skip

    def arguments(self) -> list[str]:
        """The choice as a command line gives it, what is as usual left out."""
        usual = TargetChoice(self.spec)
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)}
        return [
            "--target",
            self.spec,
            *(part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", value)),
        ]


TargetSpec = Annotated[str, typer.Option(help="smollm2 (embedded), a GGUF file, a Hugging Face directory or a hub id")]


def _options(
    target: TargetSpec = TargetChoice.spec,
    weights: Annotated[
        str, typer.Option(help="packing of the linear products: stock, fp32, fp16 or int8")
    ] = TargetChoice.weights,
    dtype: Annotated[str, typer.Option(help="of the target: float32, bfloat16 or float16")] = TargetChoice.dtype,
    device: Annotated[str, typer.Option(help="where the target runs: cpu, cuda, cuda:1")] = TargetChoice.device,
    device_map: Annotated[
        str | None,
        typer.Option(help="spread a target too big for one device: auto, balanced, sequential (instead of --device)"),
    ] = TargetChoice.device_map,
    taps: Annotated[
        str | None, typer.Option(help="the three layers whose inputs the head reads, e.g. 2,15,27; default 2, L/2, L-3")
    ] = TargetChoice.taps,
) -> TargetChoice:
    return TargetChoice(target, weights, dtype, device, device_map, taps)


Yes = Annotated[bool, typer.Option("--yes", help="ask no question before a long job")]
Force = Annotated[bool, typer.Option("--force", help="begin though disk or memory seem too small")]


def consent(yes: bool, force: bool) -> Consent:
    """What the user lets a job begin with; without a terminal there is nobody to ask."""
    return Consent(None if yes or not sys.stdin.isatty() else typer.confirm, force)


def takes_target(**defaults: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command with a parameter `target: TargetChoice` the shared options in its place; `defaults` replaces some of
    their defaults."""
    shared = [
        p.replace(default=defaults.get(name, p.default), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in inspect.signature(_options, eval_str=True).parameters.items()
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)

        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            chosen = _options(**{p.name: kwargs.pop(p.name) for p in shared})
            return command(*args, target=chosen, **kwargs)

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "target"]
        run.__signature__ = own.replace(parameters=[*kept, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*kept, *shared)} | {"return": None}
        return run

    return decorate


def _taps(told: str | None) -> tuple[int, ...] | None:
    if told is None:
        return None
    try:
        taps = tuple(int(part) for part in told.split(","))
    except ValueError:
        taps = ()
    if len(set(taps)) != 3:
        raise EyasError(f"--taps {told}: it takes three distinct layer numbers with commas between, e.g. 2,15,27")
    return taps
