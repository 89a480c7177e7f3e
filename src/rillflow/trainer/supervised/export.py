"""The finished model as a plain Hugging Face folder: a causal language model, or one that classifies with one label."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.config.supervised import FitRecipe
from rillflow.storage import disk_errors
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.supervised.assembly import Trained
from rillflow.trainer.supervised.reward_model import FACTS, Facts
from rillflow.weights.export import fill_model, new_folder, save_model
from rillflow.weights.models import load_policy_model, load_scalar_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(recipe: FitRecipe, trained: Trained, target: Path, peers: Peers) -> None:
    """Write the model, in place of what an earlier end of this run has written there. Collective."""
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
            (folder / FACTS).write_bytes(msgspec.json.encode(Facts(task=recipe.task, **known)))


def _loaded(recipe: FitRecipe) -> PreTrainedModel:
    """As it was before training: the trained one may be sharded, wrapped or in another precision."""
    cpu = torch.device("cpu")
    return (
        load_policy_model(recipe.model, "fp32", cpu)
        if recipe.task == "sft"
        else load_scalar_model(recipe.model, "fp32", cpu)[0]
    )
