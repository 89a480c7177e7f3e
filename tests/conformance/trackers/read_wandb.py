"""Runs in the trackers' environment: print, as JSON, what W&B's offline files hold of a run.

    python read_wandb.py FOLDER

The files are in LevelDB's log format: after 7 bytes, blocks of 32 KiB with records
`u32 checksum | u16 length | u8 type | data`; a record of type 1 is whole, those of types 2, 3 and 4 are its first,
middle and last part.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEAD, _BLOCK = 7, 32768


def records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    at, parts = _HEAD, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:  # the rest of a block is too small for a record
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def main() -> None:
    found: dict[str, Any] = {"ids": [], "names": [], "projects": [], "tags": [], "config": {}, "rows": [], "axes": {}}
    for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["ids"].append(record.run.run_id)
                found["names"].append(record.run.display_name)
                found["projects"].append(record.run.project)
                found["tags"].append(list(record.run.tags))
                found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "metric" and record.metric.step_metric:
                found["axes"][record.metric.name] = record.metric.step_metric
            elif kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                found["rows"].append({name: value for name, value in row.items() if not name.startswith("_")})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
