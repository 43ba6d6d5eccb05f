"""Rows out of the places people keep data in: JSONL, JSON, Parquet, CSV and plain text files, gzipped where that is usual,
folders of them, and data sets on the hub."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eyas.data.hub import hub_rows, is_hub, is_saved, saved_rows
from eyas.errors import EyasError
from eyas.progress import console

KINDS = ".jsonl, .json, .parquet, .csv, .tsv or .txt (the text kinds also gzipped)"
SHOWN = 5  # bad rows printed one by one; the rest are counted


class BadRow(NamedTuple):
    """A row that was skipped: `file`, its `line` (row number, from 1, in JSON arrays and Parquet) and `why`."""

    file: str
    line: int
    why: str


class Record(NamedTuple):
    """One row as read, from `file`. `value` is None when the row cannot be read at all; `why` then says so."""

    line: int
    value: dict[str, Any] | None
    why: str = ""
    file: str = ""

    def bad(self, why: str) -> BadRow:
        """This row as one that is skipped."""
        return BadRow(self.file, self.line, why)


def read_rows(path: Path) -> Iterator[Record]:
    """The rows of `path`, one by one: a file, by the kind that its name ends in; a folder of such files or one that the
    library `datasets` saved; or `hub:NAME[/CONFIG][:SPLIT]`.

    Raises EyasError when it is missing, of an unknown kind, or broken as a whole.
    """
    if is_hub(path) or (path.is_dir() and is_saved(path)):
        values = hub_rows(path) if is_hub(path) else saved_rows(path)
        yield from (Record(number, without_nulls(value), file=str(path)) for number, value in enumerate(values, 1))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in READERS)
        if not files:
            raise EyasError(f"{path}: no file in it that eyas reads ({KINDS})")
        for file in files:
            yield from _file_rows(file)
    elif not path.is_file():
        raise EyasError(f"{path}: no such file")
    elif _kind(path) not in READERS:
        raise EyasError(f"{path}: unknown kind of file; eyas reads {KINDS}")
    else:
        yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[Record]:
    try:
        for record in READERS[_kind(path)](path):
            yield record._replace(file=str(path))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise EyasError(f"{path}: cannot be read: {error}") from error


def without_nulls(value: Any) -> Any:
    """A columnar row as it was before: where objects differ in their keys, columns give each one the keys of all, as nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) if isinstance(part, dict | list) else part for part in value]
    return value


def is_header(row: dict[str, Any]) -> bool:
    """Whether the row is the first line that eyas writes into its own files, and no data."""
    return isinstance(row.get("eyas"), str)


def report_bad(bad: Iterable[BadRow], what: str = "rows") -> None:
    """Print the first bad rows with file, line and reason, and how many there were."""
    rows = list(bad)
    for row in rows[:SHOWN]:
        console.print(f"skipped {row.file}:{row.line}: {row.why}", style="yellow", markup=False)
    if len(rows) > SHOWN:
        console.print(f"skipped {len(rows)} {what} in all", style="yellow", markup=False)


def report_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print the first of the conversations (id, why) that were skipped, and how many there were."""
    for name, why in skipped[:SHOWN]:
        console.print(f"skipped '{name}': {why}", style="yellow", markup=False)
    if len(skipped) > SHOWN:
        console.print(f"{len(skipped):,} conversations skipped in all", style="yellow", markup=False)


def _kind(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    return ".jsonl" if kind == ".ndjson" else kind


def _bytes(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """The non-empty lines with their numbers; None for a line that is not UTF-8."""
    with _bytes(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                yield number, None
                continue
            if text.strip():
                yield number, text


def _jsonl(path: Path) -> Iterator[Record]:
    for number, text in _lines(path):
        if text is None:
            yield Record(number, None, "not UTF-8 text")
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield Record(number, None, f"not JSON: {error}")
            continue
        yield _object(number, value)


def _json(path: Path) -> Iterator[Record]:
    with _bytes(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EyasError(f"{path}: not JSON: {error}") from error
    if isinstance(value, dict):
        value = next((v for v in (value.get("data"), value.get("rows")) if isinstance(v, list)), [value])
    if not isinstance(value, list):
        raise EyasError(f"{path}: holds neither an array of rows nor an object")
    for number, item in enumerate(value, 1):
        yield _object(number, item)


def _object(number: int, value: Any) -> Record:
    if isinstance(value, dict):
        return Record(number, value)
    return Record(number, None, f"not an object but {type(value).__name__}")


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, without_nulls(value))
    except ArrowException as error:
        raise EyasError(f"{path}: not a readable Parquet file: {error}") from error


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit of 128 KiB is shorter than real prompts
    with _bytes(path) as raw:
        text = (line.decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape") for number, line in enumerate(raw))
        reader = csv.DictReader(text, delimiter="\t" if _kind(path) == ".tsv" else ",")
        if any(map(_has_bad_bytes, reader.fieldnames or ())):
            raise EyasError(f"{path}:1: the head line is not UTF-8 text; convert the file, e.g. with iconv")
        for value in reader:
            if any(isinstance(field, str) and _has_bad_bytes(field) for field in value.values()):
                yield Record(reader.line_num, None, "not UTF-8 text")
            elif None in value:  # where the module puts surplus fields
                yield Record(reader.line_num, None, "more fields than the head line names")
            else:
                yield Record(reader.line_num, {key: field for key, field in value.items() if field})


def _has_bad_bytes(text: str) -> bool:
    """Whether `text` holds bytes that were no UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _txt(path: Path) -> Iterator[Record]:
    for number, text in _lines(path):
        if text is None:
            yield Record(number, None, "not UTF-8 text")
        else:
            yield Record(number, {"prompt": text.strip()})


READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv, ".tsv": _csv, ".txt": _txt}
