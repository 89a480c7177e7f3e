"""One rank of `rillflow fit`: reads the rows, trains, and exports the model as a plain Hugging Face folder.

The exported folder holds a causal language model, or a model for sequence classification with one label.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.config.supervised import FitRecipe
from rillflow.contracts import PromptSource
from rillflow.storage import disk_errors
from rillflow.trainer.parallel.distributed import connect, device_of
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.process import prepare_torch, stops_on_signal
from rillflow.trainer.supervised.examples import Examples, read_examples
from rillflow.trainer.supervised.fit import Fit, Progress, Trained, assemble
from rillflow.trainer.supervised.reward_model import quality_of
from rillflow.trainer.supervised.texts import Writer
from rillflow.weights.model_folder import FILE, Quality, RewardFacts
from rillflow.weights.models import fill_model, load_policy_model, load_scalar_model, new_folder, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)


def export(recipe: FitRecipe, trained: Trained, target: Path, peers: Peers, quality: Quality | None = None) -> None:
    """Write the model; a folder from an earlier end of this run is replaced. Collective."""
    weights = trained.worker.weights(torch.float32)
    if peers.rank > 0:
        return
    with disk_errors(target):
        shutil.rmtree(target, ignore_errors=True)
    with new_folder(target) as folder:
        loaded = _loaded(recipe)
        fill_model(loaded, weights)
        save_model(loaded, recipe.model, folder)
        if recipe.task != "sft":
            known = {name: value for name in ("loss", "separator") if (value := getattr(recipe, name)) is not None}
            facts = RewardFacts(task=recipe.task, quality=quality, **known)
            (folder / FILE).write_bytes(msgspec.json.encode(facts))


def _loaded(recipe: FitRecipe) -> PreTrainedModel:
    """Load the model as it was before training: the trained one may be sharded, wrapped or in another precision."""
    cpu = torch.device("cpu")
    return (
        load_policy_model(recipe.model, "fp32", cpu)
        if recipe.task == "sft"
        else load_scalar_model(recipe.model, "fp32", cpu)[0]
    )


# ---------------------------------------------------------------- one rank's process


MODEL = "model"  # the folder of the finished model, in the run's folder


def run_fit(
    recipe: FitRecipe,
    folder: Path,
    train: PromptSource,
    heldout: PromptSource | None,
    *,
    place: Place | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> bool:
    """Train to the end and export the model; return False if a signal came first.

    A restarted run continues from its last checkpoint. Each of several ranks runs this at its own `place`.
    """
    stop = threading.Event()
    place = place or Place()
    device = device_of(recipe.trainer.device, place.rank)
    with stops_on_signal(stop), connect(place, device) as peers:
        prepare_torch(recipe.seed, recipe.runtime.threads, deterministic=recipe.runtime.deterministic)
        trained = assemble(recipe, peers, device)
        writer = Writer.load(recipe.model)
        longest = recipe.data.longest or int(getattr(trained.model.config, "max_position_embeddings", 1 << 30))
        fit = Fit(
            recipe,
            folder,
            trained,
            peers,
            examples=_read(train, recipe.data.train.origin, recipe, writer, longest),
            heldout=None if heldout is None else _read(heldout, "data.heldout", recipe, writer, longest),
            stop=stop.is_set,
            report=report,
        )
        if not fit.run():
            return False
        export(recipe, trained, folder / MODEL, peers, quality_of(fit.heldout()))
    return True


def _read(source: PromptSource, origin: str, recipe: FitRecipe, writer: Writer, longest: int) -> Examples:
    examples = read_examples(source, origin, recipe, writer, longest)
    if examples.left_out:
        log.warning("%s: left out %d rows with more than %d tokens", origin, examples.left_out, longest)
    return examples
