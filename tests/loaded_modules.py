"""Records which modules a process has loaded by its end, for all processes that inherit the environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

# Python imports a module of this name at the start of every process.
_HOOK = """
import atexit, json, os, sys

def write():
    path = os.path.join(os.environ["RILLFLOW_TEST_MODULES"], f"{os.getpid()}.json")
    with open(path, "w") as file:
        json.dump({"arguments": sys.argv[1:], "modules": sorted(sys.modules)}, file)

atexit.register(write)
"""


@dataclass(frozen=True)
class LoadedModules:
    """The folder in which processes with `environment` list their modules when they end normally."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        hook, written = self.folder / "hook", self.folder / "modules"
        for each in (hook, written):
            each.mkdir(parents=True, exist_ok=True)
        (hook / "sitecustomize.py").write_text(_HOOK)
        paths = [str(hook), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RILLFLOW_TEST_MODULES": str(written)}

    def of(self, command: str) -> set[str]:
        """The modules of the one process that ran `rillflow COMMAND …`, with their packages."""
        records = [json.loads(path.read_text()) for path in (self.folder / "modules").iterdir()]
        (found,) = [record["modules"] for record in records if record["arguments"][:1] == [command]]
        assert "rillflow.cli.main" in found
        return {module.partition(".")[0] for module in found}
