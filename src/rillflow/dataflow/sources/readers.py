"""Prompts of a JSONL file, a Parquet file, a function of the user, a Hugging Face dataset, a family of reasoning-gym.

JSONL: one object a line. Blank lines are passed over; a row without an id has its line's number for one.
Parquet: read in batches of rows, and spooled: it has no access to a single row.
A generator must yield the same prompts each time: a resumed run calls it again.
A dataset comes from the hub, from files in a folder, or was saved to disk. Its rows stay where the library keeps them
(mapped Arrow files) and are converted when they are asked for.
A task family of reasoning-gym: a payload is the entry (question, answer, metadata) and its `source_dataset`. Some
families draw from Python sets, whose order differs between processes. So the entries are made by a process of their own
with a fixed hash seed (`write_entries`): a resumed run gets the same ones.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from rillflow.config import SourceConfig, resolve_object
from rillflow.dataflow.sources.rows import (
    CACHED,
    Rows,
    Stored,
    encode,
    missing_package,
    optional_package,
    plain,
    prompt_id,
    refuse_duplicates,
    spooled,
)
from rillflow.errors import ConfigError, DataError, RillflowError, did_you_mean
from rillflow.types import Prompt

_PATIENCE = 120.0  # seconds without a new entry
_PROGRAM = f"import sys; from {__name__} import write_entries; write_entries(*sys.argv[1:])"


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


# ---------------------------------------------------------------- Hugging Face datasets

_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves


def open_dataset(config: SourceConfig) -> Rows:
    name = config.origin
    dataset = _one_split(name, _load(name, dict(config.arguments)))
    if config.limit is not None:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    rows = DatasetRows(name, dataset.with_format(None), config.id_key)
    rows.check()
    return rows


class DatasetRows:
    """The rows of one split, numbered from 1."""

    def __init__(self, name: str, dataset: Any, id_key: str) -> None:
        self._name, self._dataset, self._id_key = name, dataset, id_key
        self._cached = lru_cache(CACHED)(self._read)

    def check(self) -> None:
        """DataError when a row cannot be used or two have the same id."""
        encoder, hashes = msgspec.msgpack.Encoder(), array("q")
        for index, row in enumerate(self._rows()):
            prompt = self._prompt(index, row)
            encode(prompt.payload, f"{self._name}: {self.where(index)}", encoder)
            hashes.append(hash(prompt.id))
        refuse_duplicates(self._name, self, hashes)

    def where(self, index: int) -> str:
        return f"row {index + 1}"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._cached(index)

    def _read(self, index: int) -> Prompt:
        return self._prompt(index, self._dataset[index])

    def _prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        payload = plain(row, f"{self._name}: {self.where(index)}")
        return Prompt(id=prompt_id(payload, self._id_key, index + 1), payload=payload)

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            for batch in self._dataset.iter(_BATCH):
                columns = list(batch)
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))
        except Exception as error:  # decoders of images, sound … are packages of their own
            raise _unreadable(self._name, error) from error


def _load(name: str, arguments: dict[str, Any]) -> Any:
    datasets = optional_package("datasets", "datasets")
    saved = any((Path(name) / file).is_file() for file in _SAVED)
    split = arguments.pop("split", None) if saved else None
    try:
        found = datasets.load_from_disk(name, **arguments) if saved else datasets.load_dataset(name, **arguments)
    except Exception as error:  # of the hub, of files, of arguments: many, without a common base
        raise _unreadable(name, error) from error
    if split is None:
        return found
    if not isinstance(found, dict):
        raise ConfigError(f"the dataset {name} was saved without splits", "remove data.*.arguments.split")
    return found.get(split, found)


def _one_split(name: str, found: Any) -> Any:
    datasets = optional_package("datasets", "datasets")
    if isinstance(found, datasets.Dataset):
        return found
    if isinstance(found, dict):
        raise ConfigError(
            f"the dataset {name} has several splits and one must be named: {', '.join(found)}",
            f"set data.*.arguments.split, for example {next(iter(found), 'train')}",
        )
    raise ConfigError(
        f"the dataset {name} is a stream, which has no positions to resume at",
        "remove data.*.arguments.streaming",
    )


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"the dataset {name} cannot be read: {type(error).__name__}: {error}",
        "check data.*.dataset and data.*.arguments, which are those of datasets.load_dataset",
    )


# ------------------------------------------------------------ reasoning-gym


def open_reasoning_gym(config: SourceConfig) -> Rows:
    name = config.origin
    if importlib.util.find_spec("reasoning_gym") is None:
        raise missing_package("reasoning_gym", "reasoning-gym")
    if not isinstance(config.arguments.get("seed"), int):
        raise ConfigError(
            f"the reasoning-gym dataset {name} has no seed: it would be another one after a resume",
            "set data.*.arguments.seed; entry i is drawn from seed + i, so keep the seeds of training and held-out "
            "prompts further apart than their size",
        )
    with tempfile.TemporaryDirectory(prefix="rillflow-") as folder:
        lines = Path(folder) / "entries.jsonl"
        order = msgspec.json.encode((name, config.arguments, config.limit)).decode()
        _make(name, order, lines)
        # Its reader holds the file open, so that it outlives its folder.
        return index_lines(lines, name, config.id_key, config.limit)


def _make(name: str, order: str, lines: Path) -> None:
    """Let the program write the entries to `lines`."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", _PROGRAM, order, str(lines)]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(command, env=environment, stdout=complaints, stderr=complaints) as process,
    ):
        try:
            _wait(process, name, lines)
        finally:
            process.kill()
        if process.returncode:
            raise _failed(name, complaints)


def _wait(process: subprocess.Popen[bytes], name: str, lines: Path) -> None:
    size = -1
    while True:
        try:
            process.wait(_PATIENCE)
            return
        except subprocess.TimeoutExpired:
            before, size = size, lines.stat().st_size if lines.exists() else 0
            if size == before:
                raise DataError(
                    f"the reasoning-gym dataset {name} made no entry in {_PATIENCE:g} seconds",
                    "make its entries easier or choose another one",
                ) from None


def _failed(name: str, complaints: IO[bytes]) -> DataError:
    complaints.seek(0)
    said = complaints.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return DataError(
        f"the reasoning-gym dataset {name} cannot be made: {said[-1]}",
        "check data.*.reasoning_gym and data.*.arguments, which are those of reasoning_gym.create_dataset",
    )


# ---------------------------------------------------------------- the process that makes the entries


def write_entries(order: str, lines: str) -> None:
    """Write the entries of a dataset to the file `lines`, one JSON object a line. `order` has its name, arguments and
    most entries, as JSON."""
    name, arguments, limit = msgspec.json.decode(order, type=tuple[str, dict[str, Any], int | None])
    encoder = msgspec.json.Encoder()
    with Path(lines).open("wb") as file:
        for number, entry in enumerate(islice(_create(name, arguments), limit), start=1):
            source = entry["metadata"].get("source_dataset", name)  # a composite's entries are of several
            payload = plain({**entry, "source_dataset": source}, f"{name}: entry {number}")
            file.write(encoder.encode(payload) + b"\n")
            file.flush()


def _create(name: str, arguments: dict[str, Any]) -> Any:
    gym = optional_package("reasoning_gym", "reasoning-gym")
    known = sorted(gym.factory.DATASETS)
    if name not in known:
        raise ValueError(f"there is no {name!r} among {len(known)} datasets. {did_you_mean(name, known)}".rstrip())
    return gym.create_dataset(name, **arguments)
