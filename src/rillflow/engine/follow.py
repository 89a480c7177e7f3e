"""What keeps an engine of a recipe's policy on its newest weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rillflow.clients.fetching import FetchWord, Tell
from rillflow.clients.turns import Ask, EngineTurn
from rillflow.config import PolicyConfig
from rillflow.contracts import Engine
from rillflow.weights.manifest import key_of
from rillflow.weights.models import load_policy_model
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.transport.sources import open_source

if TYPE_CHECKING:
    from rillflow.contracts import Tensors


def follow(
    policy: str,
    settings: PolicyConfig,
    engine: Engine,
    *,
    name: str,
    weights: Path,
    token: str,
    turn: Ask | None = None,
    tell: Tell | None = None,
) -> Refresher:
    """Pulls from where the recipe says; without that from the run's folder, `weights`. `name` is of the process: its
    files of far sources lie beside `weights`, and it asks for turns and tells what it fetches under it."""
    far = settings.weights.source
    source = open_source(
        far or weights,
        policy,
        # Who can change the run's own folder can also read the key beside it.
        key=key_of(token) if far else b"",
        cache=weights.parent / "cache" / name,
        streams=settings.weights.streams,
        token=token,
    )

    def initial() -> Tensors:
        tensors: Tensors = load_policy_model(settings.model, settings.engine.dtype, torch.device("cpu")).state_dict()
        return tensors

    word = FetchWord(tell, policy, name) if tell else None
    puller = Puller(source, settings.weights.mode, initial=initial, announce=word)
    return Refresher(
        policy,
        engine,
        puller,
        turn=EngineTurn(turn, policy, name) if turn else None,
        doubts=settings.proves,
    )
