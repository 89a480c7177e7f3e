"""Helpers for the tests of prompt sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rillflow.config import SourceConfig
from rillflow.contracts import PromptSource
from rillflow.dataflow.sources import open_source
from rillflow.types import Prompt


def jsonl(folder: Path, *lines: Any, file: str = "prompts.jsonl", **options: Any) -> SourceConfig:
    """A file of these lines: bytes as they are, anything else as JSON."""
    path = folder / file
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return SourceConfig(path=str(path), **options)


def opened(config: SourceConfig, *, shuffle: bool = False, seed: int = 1) -> PromptSource:
    return open_source(config, seed=seed, shuffle=shuffle)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(number), payload={}) for number in range(count)]


def ids(source: PromptSource, places: Sequence[int] | None = None) -> list[str]:
    """Return the prompts of one epoch, or those at the given places."""
    return [source.at(place).id for place in (range(source.length) if places is None else places)]
