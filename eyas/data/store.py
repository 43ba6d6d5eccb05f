"""The feature store: a folder of memory-mapped shards with checksums, appended to while the target answers.

`index.json` names the target, the taps and the shards with their texts; a shard appears in it only when its file is whole, so
an interrupted job loses at most the texts that were not flushed. Processes add to one store in turn. Per token a text costs
H + 4 bytes for each tap and 6 K bytes for its teacher. A store of many taps serves heads that read some of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.chat import Sample
from eyas.data.features import TEACHER_TOP_K, Features, text_key
from eyas.data.hub import PREFIX, is_hub
from eyas.errors import EyasError
from eyas.files import in_turn, replacing, sha256, write_text
from eyas.target import Target

TEXTS_PER_SHARD = 64
_PER_TEXT = ("ids", "supervised", "taps", "scales", "teacher_ids", "teacher_probs")


def features_beside(answers: Path, drafter: str = "eagle3") -> Path:
    """Where the features of a file of answers are kept unless told otherwise, those of a data set on the hub here; kinds of
    drafters read different ones."""
    kind = "" if drafter == "eagle3" else ".final"
    if is_hub(answers):
        name = str(answers).removeprefix(PREFIX).replace("/", "-").replace(":", "-").strip("-")
        return Path(f"{name}{kind}.features")
    return answers.with_name(f"{answers.stem or 'answers'}{kind}.features")


def features_folder(told: Path | None, answers: Path, drafter: str) -> Path | None:
    """Where a run keeps the features of `answers`: as `told`, by default beside them; None for "none": nowhere."""
    if told == Path("none"):
        return None
    return told or features_beside(answers, drafter)


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
        self._wanted = self.taps = target.tap_ids
        self._shards: list[dict[str, Any]] = []
        self._where: dict[str, tuple[int, int]] = {}  # text key -> shard, place in it
        self._fresh: dict[str, Features] = {}  # in no shard yet
        self._open: dict[int, dict[str, Tensor]] = {}
        self._adding = False
        self._read_index()

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __contains__(self, key: str) -> bool:
        return key in self._where or key in self._fresh

    def __len__(self) -> int:
        return len(self._where) + len(self._fresh)

    def lacking(self, samples: Iterable[Sample]) -> list[Sample]:
        """Those of `samples` whose features are not here."""
        return [sample for sample in samples if text_key(sample) not in self]

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Keep other processes from adding, with all known that they added before; one that does so now is waited for, which
        is said. Within such a block another changes nothing."""
        if self._adding:
            yield
            return
        with in_turn(self.folder / "lock", f"another process adds features to {self.folder}; waiting for it"):
            self._adding = True
            try:
                self._read_index()
                yield
            finally:
                self._adding = False

    def bytes_needed(self, tokens: int, supervised: int) -> int:
        """Bytes on disk of texts with so many tokens, `supervised` of them with a teacher."""
        return tokens * (len(self.taps) * (self._hidden_size + 4) + 4 + 1) + supervised * 6 * self._top_k

    def bytes_unpacked(self, tokens: int) -> int:
        """Bytes of memory that the float taps of so many tokens take while their text is not finished."""
        return tokens * len(self.taps) * self._hidden_size * 4

    def add(self, features: Features) -> None:
        """Keep one text's features; they are on disk after `flush`, which happens by itself every so many texts."""
        if features.key in self:
            return
        if features.taps.shape[1] != len(self.taps):
            raise EyasError(
                f"the features in {self.folder} have taps {list(self.taps)}, these are of another choice; name another folder"
            )
        self._fresh[features.key] = features
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
        with self.adding():
            texts = [text for key, text in self._fresh.items() if key not in self._where]  # what nobody else added meanwhile
            if texts:
                self._write(texts)
            self._fresh = {}

    def _write(self, texts: list[Features]) -> None:
        """Add a shard of `texts`."""
        tensors = {name: torch.cat([getattr(text, name) for text in texts]) for name in _PER_TEXT}
        for name in ("ids", "teacher_ids"):
            tensors[f"{name}_ends"] = torch.tensor([len(getattr(text, name)) for text in texts]).cumsum(0)
        tensors["ids"] = tensors["ids"].int()
        path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
        with replacing(path, "; what was written before is kept") as part:
            save_file(tensors, part)
        shards = [*self._shards, {"file": path.name, "sha256": sha256(path), "texts": [text.key for text in texts]}]
        write_text(self.folder / "index.json", json.dumps({"made_for": self._made_for, "shards": shards}))
        self._know(shards)

    def _read_index(self) -> None:
        """Take over what the folder holds. Raises EyasError when it cannot be read or was made with other settings."""
        index = self.folder / "index.json"
        if not index.is_file():
            return
        try:
            kept = json.loads(index.read_text(encoding="utf-8"))
            made_for = {"dtype": "float32", **kept["made_for"]}
            self._know(kept["shards"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EyasError(f"{index} is not readable; delete the folder, its features can be made again") from error
        if not self._fresh and set(self._wanted) <= set(made_for["taps"]):
            self.taps, self._made_for["taps"] = tuple(made_for["taps"]), made_for["taps"]
        for key, value in self._made_for.items():
            if made_for.get(key) != value:
                raise EyasError(
                    f"the features in {self.folder} were made with {key} {made_for.get(key)}, this run has {value}; "
                    "name another folder or delete this one"
                )

    def _know(self, shards: list[dict[str, Any]]) -> None:
        self._shards = shards
        self._where = {key: (number, place) for number, one in enumerate(shards) for place, key in enumerate(one["texts"])}

    def __getitem__(self, key: str) -> Features:
        if key in self._fresh:
            return self._chosen(self._fresh[key])
        number, place = self._where[key]
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
        if self._wanted == self.taps:
            return features
        columns = [self.taps.index(tap) for tap in self._wanted]
        return replace(features, taps=features.taps[:, columns], scales=features.scales[:, columns])

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
