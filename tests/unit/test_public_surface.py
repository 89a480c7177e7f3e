"""What users build on does not change by accident: names, fields of wire structs, recipe keys, commands.

After a change that is meant: `PYTHONPATH=. python tests/unit/test_public_surface.py` writes the new surface; mention it
in the CHANGELOG.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

import rillflow
import rillflow.config
import rillflow.contracts
import rillflow.errors
import rillflow.types
from rillflow.cli.main import app
from scripts.recipes_page import SECTIONS

FROZEN = Path(__file__).with_name("public_surface.json")


def surface() -> dict[str, Any]:
    return {
        "commands": sorted(command.callback.__name__ for command in app.registered_commands if command.callback),
        "config": sorted(rillflow.config.__all__),
        "package": sorted(rillflow.__all__),
        "errors": {name: kind.status for name, kind in sorted(rillflow.errors.KINDS.items())},
        "protocols": _protocols(),
        "recipe keys": {title: sorted(model.model_fields) for title, model in SECTIONS.items()},
        "wire structs": _structs(),
    }


def _protocols() -> dict[str, list[str]]:
    return {
        name: sorted(member for member in vars(value) if not member.startswith("_"))
        for name, value in sorted(vars(rillflow.contracts).items())
        if inspect.isclass(value) and value.__module__.startswith("rillflow.contracts.")
    }


def _structs() -> dict[str, list[str]]:
    return {
        name: list(value.__struct_fields__)
        for name, value in sorted(vars(rillflow.types).items())
        if inspect.isclass(value) and issubclass(value, msgspec.Struct)
    }


def test_the_public_surface_is_as_frozen() -> None:
    assert surface() == json.loads(FROZEN.read_text()), __doc__


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
