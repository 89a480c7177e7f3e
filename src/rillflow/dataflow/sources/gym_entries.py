"""The program that writes a reasoning-gym dataset's entries, one JSON object a line: its name, arguments, most, file.

Started by `reasoning_gym` with a fixed hash seed. It says what went wrong in the last line of stderr.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rillflow.dataflow.sources.rows import optional_package, plain
from rillflow.errors import did_you_mean


def main(order: str, lines: str) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
