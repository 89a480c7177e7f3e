"""What a process that sees nothing of the run folder is told of the run.

Nothing secret is in it: passwords of URLs are taken out, and keys, variables and headers whose names say that they are
secret are masked (`config.secrets`). A process that joins takes the variables from its own environment. Of the run's
tokens it has digests only.
"""

from __future__ import annotations

from pathlib import Path

from rillflow import __version__
from rillflow.config import Recipe
from rillflow.config.secrets import masked
from rillflow.errors import StorageError
from rillflow.storage import read_json, write_json
from rillflow.types import RunRecipe
from rillflow.wire.tokens import Keyring


class Invitation:
    """The recipe of the run in `folder`, and where its weights are served now."""

    def __init__(self, recipe: Recipe, folder: Path, keyring: Keyring) -> None:
        self._recipe = masked(recipe.model_dump(mode="json"))
        self._folder = folder
        self._keyring = keyring

    def answer(self) -> RunRecipe:
        return RunRecipe(
            recipe=self._recipe,
            version=__version__,
            weights=self._url("weights"),
            folder=str(self._folder.resolve()),
            digests=self._keyring.digests,
            trainers={policy: url for policy in self._recipe["policies"] if (url := self._url(f"weights-{policy}"))},
        )

    def serves(self, policy: str, url: str) -> None:
        """The trainer of `policy` serves its weights itself; empty: it does not, they are in the run's folder."""
        path = self._path(f"weights-{policy}")
        if url:
            write_json(path, {"url": url})
        else:
            path.unlink(missing_ok=True)

    def _path(self, process: str) -> Path:
        return self._folder / "endpoints" / f"{process}.json"

    def _url(self, process: str) -> str:
        """Looked up every time: a weight server may be started at any time, and elsewhere."""
        path = self._path(process)
        try:
            return str(read_json(path)["url"]) if path.is_file() else ""
        except (StorageError, KeyError, TypeError):
            return ""
