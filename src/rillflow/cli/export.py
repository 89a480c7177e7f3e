"""`rillflow export`: choose a version of a policy and write it as a Hugging Face folder. And the checkpoints of
`rillflow eval` as model folders by policy: a run, a fit run, a model folder, a GGUF file, `tiny`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.config import Recipe
from rillflow.config.load import FIT, parse
from rillflow.errors import ConfigError, RunError
from rillflow.observe.metrics import read_metrics
from rillflow.runtime.folder import RunFolder
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.weights import FolderStore
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import SUFFIX, export_adapter, export_model, model_from_gguf

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


# ---------------------------------------------------------------- checkpoints of evaluations


@dataclass(frozen=True)
class Checkpoint:
    """`label` is short enough for a folder's name. A run has its `recipe` and a model for each of its policies; any
    other checkpoint has one model, under no name. `identity` changes when the weights do."""

    label: str
    models: dict[str, str]
    identity: dict[str, Any]
    recipe: Recipe | None = None
    why: list[str] = field(default_factory=list)


def open_checkpoint(text: str, version: str) -> Checkpoint:
    path = Path(text).expanduser()
    if (path / "recipe.yaml").is_file() and (path / "run.json").is_file():
        return _of_fit(path) if FIT in parse(path / "recipe.yaml") else _of_run(RunFolder.open(path), version)
    if path.suffix == SUFFIX:
        return _of_folder(path.stem, model_from_gguf(path))
    folder = model_folder(text)
    return _of_folder(folder.name, folder)


def _of_folder(label: str, folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.safetensors"))
    seen = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return Checkpoint(label, {"": str(folder)}, {"model": str(folder), "files": seen})


def _of_fit(path: Path) -> Checkpoint:
    model = path / "model"
    if not model.is_dir():
        raise RunError(f"{path} has no finished model", f"`rillflow fit --resume {path}` goes on with it")
    return _of_folder(path.resolve().name, model)


def _of_run(folder: RunFolder, wanted: str) -> Checkpoint:
    """Return a run's checkpoint. Its versions are written once as model folders under `exports`: a version never
    changes."""
    models, versions, why = {}, {}, []
    for policy in folder.recipe.policies:
        exporter = Exporter(folder, policy)
        choice = exporter.choose(wanted)
        target = folder.root / "exports" / f"{policy}-v{choice.version}"
        if not target.is_dir():
            exporter.export(choice.version, target)
        models[policy], versions[policy] = str(target), choice.version
        why.append(f"version {choice.version} of {policy} ({choice.why})")
    label = f"{folder.root.name}-v{versions[folder.recipe.policy]}"
    return Checkpoint(label, models, {"run": str(folder.root), "versions": versions}, folder.recipe, why)
