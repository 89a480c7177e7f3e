"""The names of a mixture's sources: those of the recipe, else after their origin; each name once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rillflow.config import SourceConfig
from rillflow.errors import ConfigError

_LONGEST = 80


def source_names(configs: Sequence[SourceConfig]) -> list[str]:
    taken: set[str] = set()
    for name in (config.name for config in configs if config.name):
        if name in taken:
            raise ConfigError(f"two sources of prompts are called {name!r}", "give each data.prompts its own name")
        taken.add(name)
    names = []
    for config in configs:
        name = config.name or _free(_default(config), taken)
        taken.add(name)
        names.append(name)
    return names


def _default(config: SourceConfig) -> str:
    if config.path:
        text = Path(config.path).stem
    elif config.generator:
        text = config.generator.rpartition(":")[2]
    else:
        text = Path(config.origin).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_LONGEST] or "source"


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free
