"""The feature store: a folder of memory-mapped shards with checksums, appended to while the target answers.

`index.json` names the target, the taps and the shards with their texts; a shard appears in it only when its file is whole, so
an interrupted job loses at most the texts that were not flushed. Per token a text costs H + 4 bytes for each tap and 6 K bytes
for its teacher. A store of many taps serves heads that read some of them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.data.features import TEACHER_TOP_K, Features
from eyas.errors import EyasError
from eyas.files import replacing, sha256, write_text
from eyas.target import Target

TEXTS_PER_SHARD = 64
_PER_TEXT = ("ids", "supervised", "taps", "scales", "teacher_ids", "teacher_probs")


def features_beside(answers: Path, drafter: str = "eagle3") -> Path:
    """Where the features of a file of answers are kept unless told otherwise; kinds of drafters read different ones."""
    kind = "" if drafter == "eagle3" else ".final"
    return answers.with_name(f"{answers.stem or 'answers'}{kind}.features")


class FeatureStore:
    """The features of many texts, by the texts' keys (`eyas.data.features.text_key`).

    `taps` are those that it keeps; what is read from it are the taps of `target`. Opening an existing folder made for another
    target or without these taps raises EyasError. Use as a context manager, or call `flush`, so that the last texts are
    written.
    """

    def __init__(self, folder: Path | str, target: Target, *, top_k: int = TEACHER_TOP_K) -> None:
        self.folder = Path(folder)
        self._made_for = {
            "target": target.fingerprint, "taps": list(target.tap_ids), "weights": target.weights, "top_k": top_k,
            "dtype": str(target.dtype).removeprefix("torch."),
        }  # fmt: skip
        self._hidden_size, self._top_k = target.hidden_size, top_k
        self.taps = target.tap_ids
        self._shards: list[dict[str, Any]] = []
        self._where: dict[str, tuple[int, int]] = {}  # text key -> shard, place in it
        self._fresh: list[Features] = []
        self._open: dict[int, dict[str, Tensor]] = {}
        index = self.folder / "index.json"
        if index.is_file():
            try:
                kept = json.loads(index.read_text(encoding="utf-8"))
                made_for, self._shards = {"dtype": "float32", **kept["made_for"]}, kept["shards"]
                for number, shard in enumerate(self._shards):
                    self._where.update({key: (number, place) for place, key in enumerate(shard["texts"])})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EyasError(f"{index} is not readable; delete the folder, its features can be made again") from error
            if set(target.tap_ids) <= set(made_for["taps"]):
                self.taps = tuple(made_for["taps"])
                self._made_for["taps"] = made_for["taps"]
            for key, value in self._made_for.items():
                if made_for.get(key) != value:
                    raise EyasError(
                        f"the features in {self.folder} were made with {key} {made_for.get(key)}, this run has {value}; "
                        "name another folder or delete this one"
                    )

        self._columns = [self.taps.index(tap) for tap in target.tap_ids]

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def bytes_needed(self, tokens: int, supervised: int) -> int:
        """Bytes on disk of texts with so many tokens, `supervised` of them with a teacher."""
        return tokens * (len(self.taps) * (self._hidden_size + 4) + 4 + 1) + supervised * 6 * self._top_k

    def bytes_unpacked(self, tokens: int) -> int:
        """Bytes of memory that the float taps of so many tokens take while their text is not finished."""
        return tokens * len(self.taps) * self._hidden_size * 4

    def add(self, features: Features) -> None:
        """Keep one text's features; they are on disk after `flush`, which happens by itself every so many texts."""
        if features.key in self._where:
            return
        if features.taps.shape[1] != len(self.taps):
            raise EyasError(
                f"the features in {self.folder} have taps {list(self.taps)}, these are of another choice; name another folder"
            )
        self._where[features.key] = (len(self._shards), len(self._fresh))
        self._fresh.append(features)
        if len(self._fresh) >= TEXTS_PER_SHARD:
            self.flush()

    def take(self, result: Any) -> None:
        """Move the features that a decoded answer carries (`result.features`) into the store."""
        self.add(result.features)
        result.features = None

    def flush(self) -> None:
        """Write what is not on disk yet. Raises EyasError when the disk is full."""
        if not self._fresh:
            return
        tensors = {name: torch.cat([getattr(f, name) for f in self._fresh]) for name in _PER_TEXT}
        for name in ("ids", "teacher_ids"):
            lengths = [len(getattr(f, name)) for f in self._fresh]
            tensors[f"{name}_ends"] = torch.tensor(lengths).cumsum(0)
        tensors["ids"] = tensors["ids"].int()
        path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
        with replacing(path, "; what was written before is kept") as part:
            save_file(tensors, part)
        shard = {"file": path.name, "sha256": sha256(path), "texts": [f.key for f in self._fresh]}
        shards = [*self._shards, shard]
        write_text(self.folder / "index.json", json.dumps({"made_for": self._made_for, "shards": shards}))
        self._shards, self._fresh = shards, []

    def __getitem__(self, key: str) -> Features:
        number, place = self._where[key]
        if number == len(self._shards):
            return self._chosen(self._fresh[place])
        shard = self._shard(number)
        text_end, row_end = shard["ids_ends"], shard["teacher_ids_ends"]
        first = int(text_end[place - 1]) if place else 0
        last = int(text_end[place])
        row = slice(int(row_end[place - 1]) if place else 0, int(row_end[place]))
        slots = slice(first - place, last - place - 1)  # a text has one slot fewer than tokens
        return self._chosen(
            Features(
                key, shard["ids"][first:last].long(), shard["supervised"][first:last], shard["taps"][slots],
                shard["scales"][slots], shard["teacher_ids"][row], shard["teacher_probs"][row],
            )
        )  # fmt: skip

    def _chosen(self, features: Features) -> Features:
        """`features` with the taps of the target alone."""
        if self._columns == list(range(len(self.taps))):
            return features
        return replace(features, taps=features.taps[:, self._columns], scales=features.scales[:, self._columns])

    def _shard(self, number: int) -> dict[str, Tensor]:
        """The memory-mapped tensors of a shard, checked once against its checksum."""
        if number not in self._open:
            entry = self._shards[number]
            path = self.folder / entry["file"]
            if not path.is_file() or sha256(path) != entry["sha256"]:
                raise EyasError(f"{path} is missing or damaged; delete {self.folder}, its features can be made again")
            with safe_open(path, "pt") as file:
                self._open[number] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return self._open[number]
