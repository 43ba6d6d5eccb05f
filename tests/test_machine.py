"""Times and memory of an accelerator: its clock waits for queued work, its memory is its own. No GPU is needed, nor tried."""

from __future__ import annotations

import itertools

import pytest
import torch

from eyas import machine
from eyas.decoding import engine
from eyas.decoding.drafters import LookupDrafter
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from tests.tiny import tiny_target

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_the_clock_waits_for_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    first = machine.clock(CPU)
    assert waited == [] and machine.clock(GPU) >= first and waited == [GPU]


def test_the_memory_of_an_accelerator_is_what_is_allocated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restarted.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20 if device == GPU else 0)
    memory = machine.PeakMemory(GPU)
    memory.restart()
    assert restarted == [GPU] and memory.read() == 3.0
    assert machine.PeakMemory().read() > 3.0  # this process has torch in it


def test_the_engine_reads_its_targets_clock_at_both_ends_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that strikes at every look, each part of each round takes one stroke."""
    strokes, devices = itertools.count(), []

    def clock(device: torch.device) -> float:
        devices.append(device)
        return float(next(strokes))

    monkeypatch.setattr(engine, "clock", clock)
    target = tiny_target()
    decoder = engine.Engine(target, LookupDrafter(target), tree=TreeShape.chain(2), max_length=64)
    asked = engine.Request([5, 6, 5, 6, 5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
    (result,) = decoder.generate([asked])
    stats = result.stats
    assert stats.draft_s == stats.verify_s == stats.other_s == stats.rounds > 0
    assert set(devices) == {target.device}
