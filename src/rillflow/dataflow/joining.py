"""What a process that sees nothing of the run folder is told of the run.

Nothing secret is in it: a node needs no password of the units' Redis server, which the units alone talk to. What a
recipe says of the environment of commands and servers does travel, because nodes start them.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rillflow import __version__
from rillflow.config import Recipe
from rillflow.errors import StorageError
from rillflow.storage import read_json
from rillflow.types import RunRecipe


class Invitation:
    """The recipe of the run in `folder`, and where its weights are served now."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe = recipe.model_dump(mode="json")
        units = self._recipe["dataflow"]["units"]
        units["redis"] = without_password(units["redis"])
        self._folder = folder

    def answer(self) -> RunRecipe:
        return RunRecipe(
            recipe=self._recipe, version=__version__, weights=self._weights(), folder=str(self._folder.resolve())
        )

    def _weights(self) -> str:
        """Looked up every time: a weight server may be started at any time, and elsewhere."""
        path = self._folder / "endpoints" / "weights.json"
        try:
            return str(read_json(path)["url"]) if path.is_file() else ""
        except (StorageError, KeyError, TypeError):
            return ""


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
