"""Prompts of a JSONL file, of a Parquet file and of a function of the user.

JSONL: one object a line. Blank lines are passed over; a row without an id has its line's number for one.
Parquet: read in batches of rows, and spooled: it has no access to a single row.
A generator must yield the same prompts each time: a resumed run calls it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import SourceConfig, resolve_object
from rillflow.dataflow.sources.rows import Rows, Stored, encode, optional_package, prompt_id, spooled
from rillflow.errors import DataError, RillflowError
from rillflow.types import Prompt

# ---------------------------------------------------------------- JSONL


def open_jsonl(config: SourceConfig) -> Rows:
    assert config.path is not None
    return index_lines(Path(config.path), config.path, config.id_key, config.limit)


def index_lines(path: Path, name: str, id_key: str, limit: int | None) -> Stored:
    """The file's lines as prompts, each looked at once; the lines after `limit` prompts are not."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"cannot read the prompts {name}: {error.strerror}", "check data.*.path") from error
    encoder = msgspec.msgpack.Encoder()
    with file:
        stored = Stored(name, "line", file, partial(_decode, name, id_key))
        start = 0
        for number, line in enumerate(file, start=1):
            if len(stored) == limit:
                break
            if line.strip():
                prompt = _decode(name, id_key, line, number)
                encode(prompt.payload, f"{name}: line {number}", encoder)
                stored.add(start, line, number, prompt.id)
            start += len(line)
        return stored.checked()


def _decode(name: str, id_key: str, line: bytes, number: int) -> Prompt:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{name}: line {number} is not valid JSON: {error}", "one JSON object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{name}: line {number} is a {type(row).__name__}, not an object", "one JSON object a line")
    return Prompt(id=prompt_id(row, id_key, number), payload=row)


# ---------------------------------------------------------------- Parquet

SUFFIXES = (".parquet", ".pq")
_BATCH = 1024


def open_parquet(config: SourceConfig) -> Rows:
    assert config.path is not None
    rows = enumerate(islice(_rows(config.path), config.limit), start=1)
    return spooled(config.path, "row", ((prompt_id(row, config.id_key, number), row) for number, row in rows))


def _rows(path: str) -> Iterator[dict[str, Any]]:
    parquet = optional_package("pyarrow.parquet", "parquet")
    try:
        with open(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(_BATCH):
                yield from batch.to_pylist()
    except OSError as error:
        raise DataError(f"cannot read the prompts {path}: {error.strerror or error}", "check data.*.path") from error
    except Exception as error:  # pyarrow's own, without a common base
        raise DataError(f"{path} cannot be read as Parquet: {error}", "check the file; JSONL ends in .jsonl") from error


# ---------------------------------------------------------------- generators

_MOST = 10_000_000


def open_generator(config: SourceConfig) -> Rows:
    assert config.generator is not None
    return spooled(config.generator, "item", islice(_items(config.generator, config.arguments), config.limit))


def _items(name: str, arguments: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    function = resolve_object(name)
    try:
        for number, item in enumerate(function(**arguments), start=1):
            if number > _MOST:
                raise DataError(f"{name} yields more than {_MOST} prompts", "is it endless? set data.*.limit")
            yield _identified(name, number, item)
    except RillflowError:
        raise
    except Exception as error:
        raise DataError(
            f"the generator {name} raised {type(error).__name__}: {error}", "check data.*.arguments and the function"
        ) from error


def _identified(name: str, number: int, item: Any) -> tuple[str, dict[Any, Any]]:
    if isinstance(item, dict) and set(item) == {"id", "payload"} and isinstance(item["payload"], dict):
        return str(item["id"]), item["payload"]
    raise DataError(f"{name}: item {number} is {item!r:.80}", 'a generator yields {"id": text, "payload": object}')
