"""How a process from elsewhere joins a run: all that it needs to know, and what it fetches meanwhile."""

from __future__ import annotations

from typing import Any

from rillflow.types.base import TokenScope, Wire


class RunRecipe(Wire, frozen=True):
    """What a process that sees nothing of the run folder works by.

    `version` is of the Rillflow that serves the run. `weights` is where the run's weight server listens, empty where
    there is none, and `trainers` where trainers elsewhere serve theirs, by policy; `folder` is the run's, which a
    process on the same host may read. `digests` are those of the run's tokens, by scope: with them a process recognises
    tokens that it does not hold (`wire.tokens.Keyring`).
    """

    recipe: dict[str, Any]
    version: str
    weights: str
    folder: str
    digests: dict[TokenScope, str]
    trainers: dict[str, str] = {}


class WeightsKey(Wire, frozen=True):
    """The key with which a trainer signs weights (`weights.signing`)."""

    key: bytes


class TellFetch(Wire, frozen=True):
    """An engine fetches this version, and serves nothing yet that would keep it in the store."""

    policy: str
    engine: str
    version: int
