"""Writes the facts of a finished run as a fixture: `python tests/unit/observe/advisory_facts RUN NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from rillflow.observe.advisories import FactReader
from rillflow.runtime.folder import RunFolder


def main(run: str, name: str) -> None:
    folder = RunFolder.open(run)
    facts = FactReader(folder).read(now=float(folder.state()["time"]))
    text = msgspec.json.encode(facts).decode().replace(str(folder.root.parents[1]), "/work")
    (Path(__file__).parent / f"{name}.json").write_text(text + "\n")


main(*sys.argv[1:])
