"""eyas: train, measure and run EAGLE-3 draft heads, so that a language model writes the same tokens sooner.

from eyas import Engine, Eagle3Drafter, Request, SamplingParams, Target, load_head

target = Target.load("smollm2")
engine = Engine(target, Eagle3Drafter(target, load_head("head", target)))
for piece in engine.stream(Request(engine.encode([{"role": "user", "content": "Why is the sky blue?"}]))):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# Threads of a product that wait for each other spin for milliseconds by default; beside one busy process a forward then takes
# ten times as long. A short spin costs nothing on a quiet machine. Read by the OpenMP runtime when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

# name -> module; imported when first asked for, since torch and transformers take seconds
_PUBLIC = {
    "Target": "eyas.target",
    "Eagle3Head": "eyas.heads.eagle3",
    "HeadConfig": "eyas.heads.config",
    "load_head": "eyas.heads.files",
    "save_head": "eyas.heads.files",
    "Eagle1Head": "eyas.heads.eagle1",
    "MedusaHead": "eyas.heads.medusa",
    "load_any_head": "eyas.heads.files",
    "load_eagle1_head": "eyas.heads.files",
    "export_head": "eyas.export.run",
    "Engine": "eyas.decoding.engine",
    "Request": "eyas.decoding.row",
    "Result": "eyas.decoding.row",
    "Piece": "eyas.decoding.row",
    "SamplingParams": "eyas.decoding.sampling",
    "Grammar": "eyas.decoding.grammar",
    "TreeShape": "eyas.decoding.tree",
    "StaticTree": "eyas.decoding.static_tree",
    "Eagle3Drafter": "eyas.decoding.drafters",
    "Eagle1Drafter": "eyas.decoding.drafters",
    "MedusaDrafter": "eyas.decoding.drafters",
    "LLMDrafter": "eyas.decoding.drafters",
    "LookupDrafter": "eyas.decoding.drafters",
    "JoinedDrafter": "eyas.decoding.drafters",
    "open_drafter": "eyas.decoding.drafters.opening",
    "TrainConfig": "eyas.training.config",
    "train": "eyas.training.recipe",
    "EyasError": "eyas.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'eyas' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
