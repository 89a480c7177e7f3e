"""A task family of reasoning-gym. A payload is the entry (question, answer, metadata) and its `source_dataset`.

Some families draw from Python sets, whose order differs between processes. So the entries are made by a process of
their own with a fixed hash seed (`write_entries`): a resumed run gets the same ones.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from rillflow.config import SourceConfig
from rillflow.dataflow.sources.readers import index_lines
from rillflow.dataflow.sources.rows import Rows, missing_package, optional_package, plain
from rillflow.errors import ConfigError, DataError, did_you_mean

_PATIENCE = 120.0  # seconds without a new entry
_PROGRAM = f"import sys; from {__name__} import write_entries; write_entries(*sys.argv[1:])"


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
