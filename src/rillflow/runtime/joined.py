"""Processes that join a run by its URL: they do not see its folder and have no supervisor.

They end with code 0 when the run has ended or they have left. SIGTERM or SIGINT makes a node leave: it finishes
episodes within its grace and hands the rest back; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import re
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rillflow.clients.joining import Joined, join, token_of
from rillflow.clients.ledgers import connect
from rillflow.config import Recipe
from rillflow.errors import ConfigError, RunError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import STOPPED, GiveUp, LoopWatchdog, leave, prepare, run_until_signal
from rillflow.types import TokenScope

if TYPE_CHECKING:
    from rillflow.rollout.node import Departure

log = logging.getLogger(__name__)

GRACE = 30.0  # seconds that a node which is asked to stop has for its episodes
PATIENCE = 600.0  # seconds without an answer of the run's service after which a process gives up
_PREDECESSOR_WAIT = 15.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class JoinOptions:
    """The options of the command line. Without `cache` the process's files are removed when it ends."""

    url: str
    name: str | None = None
    token_file: Path | None = None
    cache: Path | None = None
    episodes: int | None = None
    host: str = "127.0.0.1"
    grace: float = GRACE


def rollout_joined(options: JoinOptions) -> NoReturn:
    """Run a rollout node. Ends the process: a reward function that never returned still has its thread."""
    name = _start(options.name)
    with _own_folder(options, name) as folder:
        joined = _join(options, folder)
        code = asyncio.run(_play(name, joined, options, folder))
    leave(code)


def engine_joined(options: JoinOptions) -> int:
    """Run an engine process; nodes must reach it at `options.host`."""
    from rillflow.engine.main import run_engine

    name = _start(options.name)
    with _own_folder(options, name) as folder:
        joined = _join(options, folder)
        serving = run_engine(
            name,
            joined.recipe,
            dataflow_url=joined.url,
            token=joined.token,
            keyring=joined.keyring,
            weights=joined.weights,
            on_ready=lambda own: log.info("engine %s of %s listens at %s", name, joined.url, own),
            host=options.host,
            patience=PATIENCE,
        )
        try:
            code = run_until_signal(serving)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return 0 if code == STOPPED else code  # its answers were sent elsewhere first


def unit_joined(options: JoinOptions) -> int:
    """Run a storage unit, which keeps acknowledged rows in `options.cache`."""
    from rillflow.dataflow.storage_unit import serve_unit

    name = _start(options.name or f"unit-{_host_name()}")
    _check_reachable(options, "a storage unit keeps what it has acknowledged")
    with _own_folder(options, name) as folder:
        joined = asyncio.run(join(options.url, token_of(options.token_file), folder, scope="unit"))
        serving = serve_unit(
            joined.recipe,
            folder,
            name,
            joined.token,
            joined.url,
            keyring=joined.keyring,
            host=options.host,
            on_ready=lambda own: log.info("unit %s of %s listens at %s", name, joined.url, own),
            patience=PATIENCE,
        )
        code = run_until_signal(serving)
    return 0 if code == STOPPED else code  # its rows are still there when it comes back


def trainer_joined(options: JoinOptions, policy: str | None) -> int:
    """Run a trainer of one rank. Its checkpoints and weights are in `options.cache`; it serves the weights itself."""
    from rillflow.trainer.main import Access, run_trainer
    from rillflow.trainer.stream import NoBatch

    _check_reachable(options, "a trainer keeps checkpoints and weights")
    name = _start(options.name or f"trainer-{policy or 'first'}")
    with _own_folder(options, name) as folder:
        joined = _join(options, folder, "trainer")
        recipe, policy = joined.recipe, policy or joined.recipe.policy
        _check_trainer(recipe, policy)
        access = Access(joined.token, joined.keyring, asyncio.run(_weights_key(joined)))
        try:
            run_trainer(
                recipe,
                policy,
                folder,
                joined.url,
                access,
                serve=options.host if recipe.policies[policy].weights.source is None else None,
                patience=PATIENCE,
            )
        except NoBatch as error:
            raise GiveUp(error.message, error.hint) from error
    return 0  # asked to stop, it has written a checkpoint


async def _weights_key(joined: Joined) -> bytes:
    client = connect(joined.url, joined.token)
    try:
        return await client.weights_key()
    finally:
        await client.close()


def _check_trainer(recipe: Recipe, policy: str) -> None:
    if policy not in recipe.policies:
        raise RunError(f"the run has no policy {policy!r}", f"one of: {', '.join(recipe.policies)}")
    if recipe.policies[policy].trainer.ranks > 1 or recipe.mode != "asynchronous":
        raise ConfigError(
            "a trainer that joins by URL has one rank and plays no episodes",
            "start it where it sees the run's folder: `rillflow trainer RUN`",
        )


def _check_reachable(options: JoinOptions, why: str) -> None:
    if options.cache is None:
        raise ConfigError(f"{why}: it needs a folder of its own", "give --cache FOLDER, the same at every start")
    if options.host in ("0.0.0.0", "::"):
        raise ConfigError(f"others cannot look for this process at {options.host}", "give --host ADDRESS of this host")


def stage_joined(options: JoinOptions, stage: str, policy: str | None) -> NoReturn:
    """Run a worker of a stage. Ends the process: a stage that computes still has its thread."""
    from rillflow.runtime.roles import stage_policy
    from rillflow.stages import run_stage

    name = _start(options.name)
    with _own_folder(options, name) as folder:
        joined = _join(options, folder, "stage")
        policy = stage_policy(joined.recipe, stage, policy)
        working = run_stage(
            joined.recipe, policy, stage, dataflow_url=joined.url, token=joined.token, patience=PATIENCE
        )
        code = run_until_signal(working)
    leave(0 if code == STOPPED else code)  # its lease returns


# ---------------------------------------------------------------- before


def _start(name: str | None) -> str:
    prepare()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    name = name or f"{_host_name()}-{os.getpid()}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} cannot be the name of a node", "letters, digits, dots, dashes and underscores")
    return name


def _host_name() -> str:
    return re.sub("[^A-Za-z0-9._-]", "-", platform.node()) or "node"


@contextmanager
def _own_folder(options: JoinOptions, name: str) -> Iterator[Path]:
    """Return this process's folder for sessions and weights. A cache has one per run and name, so that it can
    continue."""
    token = token_of(options.token_file)
    if options.cache is None:
        with tempfile.TemporaryDirectory(prefix=f"rillflow-{name}-") as temporary:
            yield Path(temporary)
        return
    folder = options.cache.expanduser().resolve() / f"{name}-{hashlib.sha256(token.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"the cache {folder} cannot be made: {error}", "give another folder with --cache") from None
    with RunFolder(folder).locked(name, _PREDECESSOR_WAIT):
        yield folder


def _join(options: JoinOptions, folder: Path, scope: TokenScope = "node") -> Joined:
    joined = asyncio.run(join(options.url, token_of(options.token_file), folder, scope=scope))
    _use_threads(joined.recipe)
    return joined


def _use_threads(recipe: Recipe) -> None:
    import torch

    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)


# ---------------------------------------------------------------- a node's life


async def _play(name: str, joined: Joined, options: JoinOptions, folder: Path) -> int:
    from rillflow.rollout.main import run_node
    from rillflow.rollout.node import Departure

    recipe = _with_episodes(joined.recipe, options.episodes)
    _check_code(recipe)
    departure, ready = Departure(), asyncio.Event()
    watchdog = asyncio.create_task(LoopWatchdog(recipe.rollout.episode_timeout).run())

    def on_ready(url: str) -> None:
        log.info("node %s plays for %s, gateway at %s", name, joined.url, url)
        ready.set()

    playing = run_node(
        name,
        recipe,
        dataflow_url=joined.url,
        token=joined.token,
        keyring=joined.keyring,
        weights=joined.weights,
        folder=folder / "gateway",
        on_ready=on_ready,
        host=options.host,
        departure=departure,
        patience=PATIENCE,
    )
    try:
        return await _until_gone(playing, departure, options.grace, ready.is_set)
    finally:
        watchdog.cancel()


async def _until_gone(
    main: Coroutine[Any, Any, None], departure: Departure, grace: float, ready: Callable[[], bool]
) -> int:
    """Run the node. The first signal makes it leave, a second one ends it; before it is ready the first ends it."""
    task = asyncio.ensure_future(main)
    asked = 0

    def on_signal() -> None:
        nonlocal asked
        asked += 1
        if asked > 1 or not ready():
            task.cancel()
        else:
            departure.within(grace)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped by signal")
        return STOPPED if ready() else 0
    return 0


def _with_episodes(recipe: Recipe, episodes: int | None) -> Recipe:
    if episodes is None:
        return recipe
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"episodes": episodes})})


def _check_code(recipe: Recipe) -> None:
    """Check that this host's copies of the workflow, command and reward can be loaded."""
    from rillflow.rollout.loading import check_players

    try:
        check_players(recipe)
    except ConfigError as error:
        raise ConfigError(
            f"the run's recipe asks for something that is not on this host: {error.message}",
            f"{error.hint}; code that is not part of Rillflow must be installed here, or lie at the same path",
        ) from error
