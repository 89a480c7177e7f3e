"""A JSONL file: one object a line. Blank lines are passed over; a row without an id has its line's number for one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from rillflow.config import SourceConfig
from rillflow.dataflow.sources.rows import Rows, prompt_id
from rillflow.dataflow.sources.stored import Stored, encode
from rillflow.errors import DataError
from rillflow.types import Prompt


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
