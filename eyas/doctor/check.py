"""The doctor: everything that is found out about one head, static and by trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.bench.training_log import read_training_log
from eyas.chat import Sample
from eyas.data.samples import truncate
from eyas.doctor.cures import Case, Cure, cures, tap_sets
from eyas.doctor.evidence import Evidence, gather, write_answers
from eyas.doctor.findings import SEVERITIES, Finding
from eyas.doctor.readings import ENGINES, MAPS, Reading
from eyas.doctor.signatures import UNNORMED, signatures
from eyas.doctor.static import RETRAIN, Desk, examine
from eyas.doctor.trials import DEPTHS, Trial, run_trial, spelt
from eyas.errors import EyasError
from eyas.heads.checkpoint import Checkpoint, read_checkpoint
from eyas.heads.files import tap_ids
from eyas.heads.layouts.eagle1 import is_eagle1
from eyas.heads.layouts.medusa import is_medusa
from eyas.heads.layouts.record import read_record
from eyas.progress import progress
from eyas.target import Target
from eyas.training.acceptance import chain_tau

LOG = "log.jsonl"
MOST_TEXTS, MOST_TOKENS = 24, 512  # of given texts
MOST_FAULTS = 4  # undone one after the other
LOST, SHORT = 0.25, 0.6  # shares of the log's tau - 1 below which a head is ill, or is remarked upon
CHANCE = 2.0  # a head that has no log must be right this many times as often as the texts' commonest token


@dataclass(frozen=True)
class Measured:
    """What engines that read the head alike get from it: n-alpha and tau of a greedy chain of DEPTHS drafts, as it lies there
    and `cured` of everything that was found by trial."""

    engines: tuple[str, ...]
    tap_ids: tuple[int, ...]
    n_alpha: list[float]
    tau: float
    cured: tuple[str, ...] = ()
    cured_n_alpha: list[float] = field(default_factory=list)
    cured_tau: float = 0.0


@dataclass(frozen=True)
class Checkup:
    """What `eyas check` found. `tokens` were judged in the trials (0: the head could not be run); `logged_n_alpha` is what the
    trainer measured when it chose this head, on texts like those it learnt from."""

    head: str
    layout: str
    target: str
    fingerprint: str
    engines: tuple[str, ...]
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]
    logged_n_alpha: list[float]
    tokens: int

    @property
    def healthy(self) -> bool:
        return not any(finding.severity == "ill" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return {"healthy": self.healthy, **dataclasses.asdict(self)}


def load_target(spec: str, head: Path, *, weights: str = "stock") -> Target:
    """The target to check `head` for. Its own taps play no part, so a head's faulty ones do not keep it from being loaded; only
    a target that is too small to have default ones takes the head's."""
    try:
        return Target.load(spec, weights=weights)
    except EyasError:
        return Target.load(spec, weights=weights, taps=tap_ids(head))


def check_head(
    folder: Path, target: Target, *, engines: Sequence[str] = tuple(ENGINES), texts: Sequence[Sample] | None = None
) -> Checkup:
    """Examine the head in `folder` for `target`, as `engines` (keys of ENGINES) would load it.

    `texts` are what drafts are judged on, by default the target's own greedy answers to a dozen everyday requests. Raises
    EyasError when there is no head to be read or its training log is damaged.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise EyasError(f"unknown engine '{engine}'; choose one of {', '.join(ENGINES)}")
    checkpoint = read_checkpoint(folder, target.device)
    if is_eagle1(checkpoint):
        raise EyasError(f"{folder} holds an EAGLE-1 head; only EAGLE-3 heads are examined")
    if is_medusa(checkpoint):
        raise EyasError(f"{folder} holds Medusa heads; only EAGLE-3 heads are examined")
    desk = Desk(checkpoint, target, tuple(engines))
    found, readings = examine(desk)
    logged = read_training_log(folder / LOG).best_n_alpha[:DEPTHS] if (folder / LOG).is_file() else []
    measured, tokens = [], 0
    if readings:
        layers = {tap for reading in readings.values() for taps in _taps_wanted(reading, target) for tap in taps}
        judged = truncate(texts[:MOST_TEXTS], MOST_TOKENS).samples if texts else write_answers(target)
        evidence = gather(target, judged, (i for i in layers if 0 <= i <= target.num_layers))
        tokens = evidence.written
        groups = _alike(readings)
        with progress("trials", len(groups), "readings") as meter:
            for names, reading in groups:
                seen, figures = _try(names, reading, checkpoint, evidence, target, logged)
                found += seen
                measured.append(figures)
                meter.advance()
    return Checkup(
        str(folder), checkpoint.layout, target.name, target.fingerprint, tuple(ENGINES[e] for e in engines),
        tuple(_merged(found)), tuple(measured), logged, tokens,
    )  # fmt: skip


def _taps_wanted(reading: Reading, target: Target) -> list[tuple[int, ...]]:
    return [reading.config.tap_ids, *tap_sets(reading.config.tap_ids, target)]


def _alike(readings: dict[str, Reading]) -> list[tuple[tuple[str, ...], Reading]]:
    """The readings that differ, each with the names of the engines that share it."""
    groups: list[tuple[list[str], Reading]] = []
    for engine, reading in readings.items():
        names = next((names for names, other in groups if other.config == reading.config), None)
        if names is None:
            groups.append(([ENGINES[engine]], reading))
        else:
            names.append(ENGINES[engine])
    return [(tuple(names), reading) for names, reading in groups]


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding a name, the gravest first. Where files and trials agree, the trial's words follow, and its cure, which knows
    the right value, takes the other's place."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        first = merged.get(finding.name)
        if first is None:
            merged[finding.name] = finding
            continue
        merged[finding.name] = Finding(
            finding.name, min(first.severity, finding.severity, key=SEVERITIES.index),
            f"{first.told}; by trial: {finding.told}", finding.cure, first.engines or finding.engines,
        )  # fmt: skip
    return sorted(merged.values(), key=lambda finding: SEVERITIES.index(finding.severity))


def _try(
    names: tuple[str, ...], reading: Reading, checkpoint: Checkpoint, evidence: Evidence, target: Target,
    logged: list[float],
) -> tuple[list[Finding], Measured]:  # fmt: skip
    """What trials tell of one reading, and its figures before and after the cures that they found."""
    maps = {name: checkpoint.tensors[name] for name in MAPS if name in checkpoint.tensors}
    taps, first = reading.config.tap_ids, run_trial(reading, evidence, target)
    found: list[Finding] = []
    last, marks = first, signatures(reading, evidence, target)
    curable = not any(mark.name == UNNORMED for mark in marks)
    while curable and len(found) < MOST_FAULTS and (best := _best_cure(Case(reading, maps, target, evidence, last))):
        cure, trial = best
        rates = [one.acceptance.n_alpha[0] for one in (last, trial)]
        told = f"{cure.told} (undone, n-alpha at depth 1 goes from {rates[0]:.2f} to {rates[1]:.2f})"
        found.append(Finding(cure.name, "ill", told, cure.cure, names))
        reading, last = cure.reading, trial
    cured = tuple(finding.name for finding in found)
    if cured:
        marks = signatures(reading, evidence, target)
    found += marks
    if not any(mark.name == UNNORMED for mark in marks):
        found += _acceptance(last, evidence, logged, read_record(checkpoint.config).get("target_fingerprint", ""))
    before, after = first.acceptance, last.acceptance
    figures = Measured(names, taps, before.n_alpha, before.tau, cured, *((after.n_alpha, after.tau) if cured else ([], 0.0)))
    return found, figures


def _best_cure(case: Case) -> tuple[Cure, Trial] | None:
    """The cure that helps most, of those that help beyond noise."""
    tried = [(cure, run_trial(cure.reading, case.evidence, case.target)) for cure in cures(case)]
    helping = [(cure, trial) for cure, trial in tried if trial.beats(case.trial)]
    return max(helping, key=lambda pair: pair[1].mean_overlap, default=None)


def _acceptance(trial: Trial, evidence: Evidence, logged: list[float], recorded: str) -> list[Finding]:
    """Whether what is accepted, all cures applied, is what the training log lets expect; without a log, whether it is more than
    chance. `recorded` is the fingerprint of the target that the head names."""
    measured = trial.acceptance
    shown = spelt(measured.n_alpha)
    stranger = "acceptance-lost" if recorded == evidence.fingerprint else "wrong-target"
    if logged:
        share = (measured.tau - 1) / max(chain_tau(logged) - 1, 1e-9)
        told = f"n-alpha is {shown}; when the trainer chose this head it was {spelt(logged)}"
        if share >= SHORT:
            return []
        if share >= LOST:
            cure = "check it on texts like those it learnt from (--texts); if it stays so, train it longer"
            return [Finding("low-acceptance", "warning", told, cure)]
        return [Finding(stranger, "ill", f"{told}, and no known fault explains the loss", RETRAIN)]
    if measured.n_alpha[0] > CHANCE * evidence.commonest:
        return []
    told = (
        f"n-alpha is {shown}, and the commonest token alone makes up {evidence.commonest:.2f} of the texts: it drafts by "
        "chance, and no known fault explains it; it was trained for another target, or hardly trained"
    )
    return [Finding(stranger, "ill", told, RETRAIN)]
