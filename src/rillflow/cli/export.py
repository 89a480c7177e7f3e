"""`rillflow export`: choose a version of a policy and write it as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.errors import ConfigError, RunError
from rillflow.observe.metrics import read_metrics
from rillflow.runtime.folder import RunFolder
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.weights import FolderStore
from rillflow.weights.models import export_adapter, export_model

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

_CRITIC = "critic/"


@dataclass(frozen=True)
class Choice:
    """A version, and why it was taken."""

    version: int
    why: str


class Exporter:
    """Exports versions of one policy of a run, which may be running."""

    def __init__(self, folder: RunFolder, policy: str | None) -> None:
        recipe = folder.recipe
        self.policy = policy or recipe.policy
        if self.policy not in recipe.policies:
            raise RunError(f"the run has no policy {policy!r}", f"one of: {', '.join(recipe.policies)}")
        self._folder = folder
        self._first = recipe.policy
        self._model = recipe.policies[self.policy].model
        self._store = FolderStore(folder.weights(self.policy))
        self._checkpoints = Checkpoints(folder.checkpoints(self.policy), 1)

    def versions(self) -> list[int]:
        """Return the versions of the live line that are kept, published or in a checkpoint."""
        return sorted({*self._store.versions(), *self._checkpoints.versions()} - self._store.line().orphaned)

    def choose(self, wanted: str) -> Choice:
        kept = self.versions()
        if not kept:
            raise RunError(f"nothing of {self.policy} has been published yet", "a trainer publishes as it starts")
        if wanted == "latest":
            return Choice(kept[-1], "the latest")
        if wanted == "best":
            return self._best(kept)
        if not wanted.isdecimal():
            raise ConfigError(f"{wanted!r} is not a version", "give latest, best or a number")
        if int(wanted) not in kept:
            raise RunError(f"version {wanted} is not kept", f"these are: {', '.join(map(str, kept))}")
        return Choice(int(wanted), "as asked for")

    def _best(self, kept: list[int]) -> Choice:
        """Return the version of the evaluation with the highest reward (the mean over its sources); the latest of
        equals."""
        done = read_metrics(self._folder.metrics, self._first).evaluations
        rated = [(one["reward"], self._version_in(one)) for one in done if one["reward"] is not None]
        if not rated:
            raise RunError("no evaluation has ended, so the best version is unknown", "give data.heldout next time")
        best = max(rated)
        found = max((one for one in rated if one[1] in kept), default=None)
        if found is None:
            raise RunError(f"version {best[1]} was best and is not kept", f"these are: {', '.join(map(str, kept))}")
        why = "the best" if found == best else f"the best that is kept; version {best[1]} had {best[0]:.3f}"
        return Choice(found[1], f"{why}: held-out reward {found[0]:.3f}")

    def _version_in(self, evaluation: dict[str, Any]) -> int:
        """This policy's version in an evaluation."""
        if self.policy == self._first:
            return int(evaluation["version"])
        versions = evaluation.get("versions", {})
        if self.policy not in versions:
            raise ConfigError(f"evaluations go by the versions of {self._first}", "give --version latest or a number")
        return int(versions[self.policy])

    def export(self, version: int, target: Path) -> None:
        export_model(self._tensors(version), self._model, target)

    def export_adapter(self, version: int, target: Path) -> None:
        adapter = self._store.adapter(version) if version in self._store.versions() else None
        if adapter is None:
            raise RunError(
                f"version {version} of {self.policy} is not an adapter",
                "only versions that LoRA has trained are; without --adapter all weights are exported",
            )
        export_adapter(adapter, self._model, target)

    def _tensors(self, version: int) -> Tensors:
        if version in self._store.versions():
            return self._store.pull(version)
        masters = self._checkpoints.load(version).masters
        return {name: tensor for name, tensor in masters.items() if not name.startswith(_CRITIC)}
