"""The checkpoints of `rillflow eval` as model folders by policy: a run, a fit run, a model folder, a GGUF file,
`tiny`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rillflow.cli.export import Exporter
from rillflow.config import Recipe
from rillflow.config.load import FIT, parse
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import SUFFIX, model_from_gguf


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
