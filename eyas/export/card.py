"""The README of an exported head: the command that serves it, and a model card."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2

from eyas.bench.grid import Report
from eyas.errors import EyasError
from eyas.export.engine import Engine, Order
from eyas.heads.files import head_hash
from eyas.target import Target


def write_card(engine: Engine, order: Order, folder: Path, place: Path, *, report: Path | None, licence: str | None) -> str:
    """The text of the README for the head in `folder`, exported to `place`.

    Raises EyasError when the report is missing, or measured another head or target.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eyas.export"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("README.md.j2").render(
        engine=engine,
        config=order.config,
        target=order.target.name,
        dtype=order.dtype,
        parameters=sum(t.numel() for t in order.tensors.values() if t.is_floating_point()),
        command=engine.serving(order, place),
        weights=head_hash(folder),
        texts=texts_trained_on(folder),
        race=race_of(report, folder, order.target) if report else None,
        licence=licence,
    )


def texts_trained_on(folder: Path) -> int | None:
    """The number of texts that the trainer recorded beside a head in `train.json`; None for a head from elsewhere."""
    path = folder / "train.json"
    if not path.is_file():
        return None
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))["texts"]
        return texts if isinstance(texts, int) else len(texts["learn"])  # the first version kept the number alone
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def race_of(path: Path, folder: Path, target: Target) -> dict[str, Any]:
    """Conditions of the report's first race, and tau of every suite with its number of answers, for the head in `folder`."""
    report = Report.read(path)
    if not report.races:
        raise EyasError(f"{path} holds no race yet")
    race = report.races[0]
    if race.conditions.fingerprint != target.fingerprint:
        raise EyasError(f"{path} is a race on another target ({race.conditions.target}), not on '{target.name}'")
    wanted = head_hash(folder)
    found = next((figures for figures in race.speculative.values() if figures.head == wanted), None)
    if found is None:
        raise EyasError(f"{path} is a race without this head ({wanted}); run `eyas bench --drafter {folder} --json` again")
    answers = Counter(row.suite for row in race.rows)
    return {
        "conditions": race.conditions,
        "tree": found.tree,
        "identical": found.identical,
        "tau": {suite: (part.tau, answers[suite]) for suite, part in found.parts["suite"].items()},
    }
