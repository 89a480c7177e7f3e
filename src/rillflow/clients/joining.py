"""How a process joins a run that it sees nothing of but the service's URL: recipe, weights and token.

Invariant: whatever is wrong (no service, another token, another version, code or weights that cannot be had here) is
one error before anything is started, and says what to do.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rillflow import __version__
from rillflow.clients.dataflow import DataflowClient, reached_by
from rillflow.clients.ledgers import connect
from rillflow.config import Recipe
from rillflow.config.load import read_resolved, validate
from rillflow.config.secrets import missing, unmasked
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, Forbidden, RillflowError, RunError, Unauthorized, WireError
from rillflow.storage import read_json
from rillflow.types import RunRecipe, TokenScope
from rillflow.wire.tokens import Keyring, scoped_token

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "RILLFLOW_TOKEN"
REACHED = 20.0  # seconds for the service to answer: it may just be starting
WEIGHTS = 60.0  # seconds for the run's weight server to listen, where it is to have one
_LOOK = 0.5


@dataclass(frozen=True)
class Joined:
    """A run as a process from elsewhere works on it. `url` is its address (`clients.ledgers`). `token` is of its own
    scope; the `keyring` recognises all others. `weights` is the run's own folder of weights where it lies on this host;
    else the recipe names where they come from, and the folder is this process's own."""

    url: str
    token: str
    keyring: Keyring
    recipe: Recipe
    weights: Path


def token_of(file: Path | None) -> str:
    """A token of the run, from a file or the environment; never from the command line, which everybody can read."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(
                "no token of the run is known",
                f"set {TOKEN_VARIABLE}, or give --token-file FILE; `rillflow token RUN` prints it, where the run's "
                "folder is",
            )
        return token.strip()
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}", "check the path and its rights") from None
    if not token:
        raise ConfigError(f"the token file {file} is empty", "it holds what `rillflow token RUN` prints")
    return token


async def join(url: str, token: str, cache: Path, *, scope: TokenScope = "node", clock: Clock | None = None) -> Joined:
    """Join the run at `url` and return all that a process of this `scope` needs of it. `cache` is its own folder.

    `token` is of that scope, or the operator's, from which one of that scope is made. For nodes and engines (scope
    `node`) the answer also has the source of weights."""
    clock = clock or SystemClock()
    client = connect(_checked(url), token, clock=clock)
    try:
        told = await _told(client, REACHED, scope)
        recipe = _recipe(told)
        folder, weights, keyring = Path(told.folder), cache / "weights", Keyring(told.digests)
        token = _own_token(token, keyring, scope)
        if is_here(folder, token, scope):
            own, weights = folder / "recipe.yaml", folder / "weights"
            recipe = read_resolved(own) if own.is_file() else recipe  # with its secrets
        elif scope == "node" and any(policy.weights.source is None for policy in recipe.policies.values()):
            recipe = _pulling(recipe, await _sources(client, told, recipe, clock))
        # A unit keeps rows of the ledger that it was sent to.
        address = client.wire.url if scope == "unit" else _address(client, told, recipe)
        return Joined(address, token, keyring, recipe, weights)
    finally:
        await client.close()


def _address(client: DataflowClient, told: RunRecipe, recipe: Recipe) -> str:
    """Return the address of all ledgers of the run, of which one was reached."""
    if recipe.dataflow.ledgers == 1:
        return client.wire.url
    if len(told.ledgers) != recipe.dataflow.ledgers:
        raise RunError("not all ledgers of the run listen yet", "join again in a moment; see the run's logs")
    return ",".join(reached_by(url, client.wire.url) for url in told.ledgers)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{url!r} is not the URL of a run", "as in http://10.0.0.5:8000: see RUN/endpoints/dataflow.json"
        )
    return url.rstrip("/")


def _own_token(token: str, keyring: Keyring, scope: TokenScope) -> str:
    """Return the token of `scope`; RunError where `token` is neither that nor the operator's."""
    held = keyring.scope_of(token)
    if held == "operator":
        return scoped_token(token, scope)
    if held != scope:
        raise RunError(f"this token has scope {held}, and {scope} is needed here", _take(scope))
    return token


def _take(scope: TokenScope) -> str:
    return f"take the one that `rillflow token RUN {scope}` prints, where that run's folder is"


async def _told(client: DataflowClient, deadline: float, scope: TokenScope = "node") -> RunRecipe:
    where = client.wire.url
    try:
        return await client.recipe(deadline)
    except (Unauthorized, Forbidden) as error:
        raise RunError(
            f"the run at {where} does not take this token: {error.message}",
            _take(scope),
        ) from error
    except WireError as error:
        raise RunError(
            f"no run answers at {where}: {error.message}",
            "is it running, does it listen on an address that this host reaches (runtime.host), and is it of this "
            "version of Rillflow?",
        ) from error


def _recipe(told: RunRecipe) -> Recipe:
    for name in sorted(set(missing(told.recipe, os.environ))):
        log.warning(
            "the run's recipe has a secret %s that it does not tell: set it in this process's environment", name
        )
    try:
        return validate(unmasked(told.recipe, os.environ))
    except ConfigError as error:
        raise RunError(
            f"the run's recipe cannot be read here: {error.message}",
            f"the run is of Rillflow {told.version}, this is {__version__}: install the same version on both",
        ) from error


def is_here(folder: Path, token: str, scope: TokenScope = "node") -> bool:
    """Whether the run's own folder can be read on this host: the same run, not another one at the same path. Nodes read
    weights there, where there are any."""
    try:
        own = scoped_token(read_json(folder / "run.json")["token"], scope)
        return hmac.compare_digest(own, token) and (scope != "node" or (folder / "weights").is_dir())
    except (OSError, RillflowError, AttributeError, KeyError, TypeError):
        return False


# ---------------------------------------------------------------- weights


async def _sources(client: DataflowClient, told: RunRecipe, recipe: Recipe, clock: Clock) -> dict[str, str]:
    """Where weights come from, by policy: a trainer that serves its own, or the run's weight server. A run that is to
    have one may still be starting it."""
    end = clock.monotonic() + (WEIGHTS if recipe.runtime.weights_server else 0.0)
    while not (told.weights or all(policy in told.trainers for policy in recipe.policies)):
        if clock.monotonic() >= end:
            wanted = "has not started its weight server yet" if recipe.runtime.weights_server else "serves no weights"
            raise RunError(
                f"the run {wanted}, and its folder {told.folder} is not on this host",
                "start the run with runtime.weights_server=true, or run `rillflow weights RUN` beside it, or say where "
                "weights are with policies.*.weights.source; a trainer that joins by URL serves them: start it first",
            )
        await asyncio.sleep(_LOOK)
        told = await _told(client, REACHED)
    return {policy: told.trainers.get(policy, told.weights) for policy in recipe.policies}


def _pulling(recipe: Recipe, sources: Mapping[str, str]) -> Recipe:
    """The recipe with these sources for the policies that name none of their own."""
    policies = {
        name: policy
        if policy.weights.source is not None
        else policy.model_copy(update={"weights": policy.weights.model_copy(update={"source": sources[name]})})
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})
