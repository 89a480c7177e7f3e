"""The file of an executor's nodes. A node is in it from before its start until after its stop, so that a new maintainer
finds every node that may be running, whatever was killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rillflow.errors import CorruptData
from rillflow.storage import write_atomic
from rillflow.types.decoding import json_decoder


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A node. `pid` and `began` (seconds since the epoch) are of a process on this machine, once it is known."""

    pid: int | None = None
    began: float | None = None


class KeptNodes:
    """The nodes on disk, written atomically; the file is removed with its last node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> dict[str, Kept]:
        if not self._path.is_file():
            return {}
        try:
            return json_decoder(dict[str, Kept]).decode(self._path.read_bytes())
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{self._path} cannot be read: {error}",
                "end the nodes that it names by hand (rillflow retire), then remove it",
            ) from error

    def keep(self, node: str, kept: Kept) -> None:
        self._write(self.all() | {node: kept})

    def forget(self, node: str) -> None:
        self._write({name: kept for name, kept in self.all().items() if name != node})

    def _write(self, nodes: dict[str, Kept]) -> None:
        if nodes:
            write_atomic(self._path, msgspec.json.format(msgspec.json.encode(nodes), indent=2) + b"\n")
        else:
            self._path.unlink(missing_ok=True)
