"""How a process on another host joins a run."""

from __future__ import annotations

from typing import Any

from rillflow.types.base import TokenScope, Wire


class RunRecipe(Wire, frozen=True):
    """The recipe and addresses for a process that does not see the run folder.

    `version` is that of the Rillflow that serves the run. `weights` is the address of the run's weight server, or
    empty. `trainers` are the addresses at which trainers elsewhere serve their weights, by policy. `folder` is the run
    folder, which a process on the same host may read. `digests` are those of the run's tokens, by scope: with them a
    process recognises tokens that it does not hold (`wire.tokens.Keyring`). `ledgers` are the URLs of the
    run's ledgers, in order, if it has several; empty until all of them listen.
    """

    recipe: dict[str, Any]
    version: str
    weights: str
    folder: str
    digests: dict[TokenScope, str]
    trainers: dict[str, str] = {}
    ledgers: list[str] = []


class WeightsKey(Wire, frozen=True):
    """The key with which a trainer signs weights (`weights.manifest`)."""

    key: bytes


class TellFetch(Wire, frozen=True):
    """The report that an engine fetches this version, so that the store keeps it meanwhile."""

    policy: str
    engine: str
    version: int
