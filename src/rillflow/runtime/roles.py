"""The main functions of the roles' processes: read the run folder, run the part, publish its address.

A role returns the code that its process ends with: 0 when it has finished, `STOPPED` when a signal came before.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from rillflow.contracts import Generator, GroupReward
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.forkserver import start_ranks
from rillflow.runtime.process import (
    STOPPED,
    GiveUp,
    LoopWatchdog,
    bind_host,
    child_environment,
    leave,
    prepare,
    run_until_signal,
)
from rillflow.storage import startup
from rillflow.storage.spans import open_spans
from rillflow.types.runs import process_of

if TYPE_CHECKING:
    from rillflow.config import Recipe
    from rillflow.storage.spans import Spans
    from rillflow.trainer.parallel.launch import Place

log = logging.getLogger(__name__)

_ENDPOINT_WAIT = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A process whose supervisor was killed takes a few seconds to end; two at once would write to the same files.
PREDECESSOR_WAIT = 15.0


def dataflow_role(folder: RunFolder, *, ledger: int = 0, resume: bool = False) -> int:
    """Serve the ledger of this number. `resume` continues a run that ended before it had finished."""
    recipe, name = folder.recipe, process_of(ledger)
    _check_ledger(recipe, ledger)
    startup.report_to(folder.root, name, "opening the ledger")
    from rillflow.dataflow.main import serve

    port = recipe.runtime.port + ledger if recipe.runtime.port else folder.last_port(name)

    async def main() -> None:
        await serve(
            recipe,
            folder.root,
            folder.token,
            host=bind_host(recipe),
            port=port,
            on_ready=startup.and_ready(lambda url: folder.publish_endpoint(name, url)),
            ledger=ledger,
            resume=resume,
            group_reward=_group_reward(recipe),
        )

    prepare()
    with folder.locked(name, PREDECESSOR_WAIT):
        return run_until_signal(main())


def _check_ledger(recipe: Recipe, ledger: int) -> None:
    if not 0 <= ledger < recipe.dataflow.ledgers:
        raise RunError(f"there is no ledger {ledger} in this run", f"it has {recipe.dataflow.ledgers}, from 0")


def _group_reward(recipe: Recipe) -> GroupReward | None:
    """Return the parts of the recipe's reward that compare whole groups, if it has any."""
    if recipe.reward is None or (isinstance(recipe.reward, str) and ":" not in recipe.reward):
        return None
    from rillflow.agents.rewards.registry import load_group_reward

    return load_group_reward(recipe.reward)


def unit_role(folder: RunFolder, name: str, *, ledger: int = 0) -> int:
    """A storage unit, which keeps rows of the ledger of this number."""
    recipe = folder.recipe
    _check_name(name)
    _check_ledger(recipe, ledger)
    startup.report_to(folder.root, name, "importing")
    from rillflow.dataflow.storage_unit import serve_unit

    async def main() -> None:
        await serve_unit(
            recipe,
            folder.root,
            name,
            folder.token_of("unit"),
            await wait_for_endpoint(folder, process_of(ledger)),
            keyring=folder.keyring,
            host=bind_host(recipe),
            port=0,  # its peers get its present address from the dataflow service
            on_ready=startup.and_ready(lambda own: folder.publish_endpoint(name, own)),
        )

    prepare()
    with folder.locked(name, PREDECESSOR_WAIT):
        return run_until_signal(main())


def weights_role(folder: RunFolder, *, host: str | None = None, port: int | None = None) -> int:
    """Serve the weights of all policies. Other hosts can use it if they can reach `host`."""
    startup.report_to(folder.root, "weights", "importing")
    from rillflow.weights.transport.serve import serve_weights

    recipe = folder.recipe
    used = port if port is not None else recipe.runtime.weights_port or folder.last_port("weights")

    async def main() -> None:
        await serve_weights(
            folder.root / "weights",
            folder.token,
            on_ready=startup.and_ready(lambda own: folder.publish_endpoint("weights", own)),
            host=host or bind_host(recipe),
            port=used,  # relays and nodes look for it there
        )

    prepare()
    with folder.locked("weights", PREDECESSOR_WAIT):
        return run_until_signal(main())


def engine_role(folder: RunFolder, name: str) -> int:
    _check_name(name)
    startup.report_to(folder.root, name, "importing torch")
    from rillflow.engine.main import run_engine

    recipe = folder.recipe
    _use_threads(recipe.runtime.threads)

    async def main() -> None:
        await run_engine(
            name,
            recipe,
            dataflow_url=await wait_for_run(folder),
            token=folder.token_of("node"),
            keyring=folder.keyring,
            weights=folder.root / "weights",
            on_ready=startup.and_ready(lambda own: folder.publish_endpoint(name, own)),
            host=bind_host(recipe),
        )

    prepare()
    with folder.locked(name, PREDECESSOR_WAIT):
        return run_until_signal(main())


def rollout_role(folder: RunFolder, name: str) -> int:
    _check_name(name)
    startup.report_to(folder.root, name, "importing torch")
    from rillflow.rollout.main import run_node

    recipe = folder.recipe
    _use_threads(recipe.runtime.threads)

    async def main() -> None:
        url = await wait_for_run(folder)
        watchdog = asyncio.create_task(LoopWatchdog(recipe.rollout.episode_timeout).run())
        try:
            await run_node(
                name,
                recipe,
                dataflow_url=url,
                token=folder.token_of("node"),
                keyring=folder.keyring,
                weights=folder.root / "weights",
                folder=folder.gateway(name),
                on_ready=startup.and_ready(lambda own: folder.publish_endpoint(name, own)),
                host=bind_host(recipe),
                port=folder.last_port(name),  # agents from outside look for their sessions there
            )
        finally:
            watchdog.cancel()

    prepare()
    with folder.locked(name, PREDECESSOR_WAIT):
        code = run_until_signal(main())
    leave(code)  # a reward function that never returned still has its thread


def stage_role(folder: RunFolder, stage: str, *, policy: str | None = None, name: str | None = None) -> int:
    """Run a worker of a stage; `name` is that of the process."""
    recipe = folder.recipe
    policy = stage_policy(recipe, stage, policy)
    name = name or f"stage-{policy}-{stage}-0"
    _check_name(name)
    startup.report_to(folder.root, name, "importing torch")
    from rillflow.stages import run_stage

    _use_threads(recipe.runtime.threads)

    async def main() -> None:
        url = await wait_for_run(folder)
        with closing(open_spans(folder.root, name)) as spans:
            await run_stage(recipe, policy, stage, dataflow_url=url, token=folder.token_of("stage"), spans=spans)

    prepare()
    with folder.locked(name, PREDECESSOR_WAIT):
        code = run_until_signal(main())
    leave(code)  # a stage that computes still has its thread


def stage_policy(recipe: Recipe, stage: str, policy: str | None) -> str:
    """Return the policy that has the stage; raises RunError if none or several have it."""
    found = [name for name, settings in recipe.policies.items() if stage in settings.stages]
    if policy is not None and policy in found:
        return policy
    if policy is None and len(found) == 1:
        return found[0]
    known = [f"{stage} of {name}" for name, settings in recipe.policies.items() for stage in settings.stages]
    if policy is None and found:
        raise RunError(f"{' and '.join(found)} both have a stage {stage!r}", "say whose with --policy")
    whose = "the run" if policy is None else f"policy {policy}"
    raise RunError(f"{whose} has no stage {stage!r}", f"there are: {', '.join(known) or 'none'}")


def trainer_role(
    folder: RunFolder,
    policy: str,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    rendezvous: str = "",
    playing: str | None = None,
) -> int:
    """Run one rank of a trainer; without `rank`, all of them. The ranks in `playing` (such as "0,2") also play; by
    default all do, or in an asynchronous run none."""
    from rillflow.trainer.parallel.launch import Place

    recipe = folder.recipe
    if policy not in recipe.policies:
        raise RunError(f"the run has no policy {policy!r}", f"one of: {', '.join(recipe.policies)}")
    ranks = ranks or recipe.policies[policy].trainer.ranks
    hosts = _playing_ranks(playing, ranks, by_default=recipe.mode != "asynchronous")
    if rank is None and ranks > 1:
        prepare(may_fork=True)
        return _all_ranks(folder, policy, ranks, hosts)
    prepare()
    return _one_rank(folder, policy, Place(rank or 0, ranks, rendezvous), hosts)


def _playing_ranks(playing: str | None, ranks: int, *, by_default: bool) -> frozenset[int]:
    if playing is None:
        return frozenset(range(ranks) if by_default else ())
    named = [part.strip() for part in playing.split(",")] if playing.strip() else []
    if not all(part.isdecimal() and int(part) < ranks for part in named):
        raise RunError(
            f"--playing {playing!r} does not name ranks of this trainer", f"numbers below {ranks}, such as 0,1"
        )
    return frozenset(map(int, named))


def _all_ranks(folder: RunFolder, policy: str, ranks: int, playing: frozenset[int]) -> int:
    from rillflow.trainer.parallel.launch import launch

    def arguments(rank: int, rendezvous: str) -> list[str]:
        options = ("--rank", str(rank), "--ranks", str(ranks), "--rendezvous", rendezvous, "--playing", hosts)
        return ["trainer", str(folder.root), "--policy", policy, *options]

    name, hosts = f"trainer-{policy}", ",".join(map(str, sorted(playing)))
    with folder.locked(name, PREDECESSOR_WAIT):
        environment = child_environment(folder.recipe.runtime.threads)
        start = start_ranks(("rillflow.trainer.main", "transformers.modeling_utils"))
        return launch(arguments, ranks, environment, lambda rank: folder.log(f"{name}-rank{rank}"), start)


def _one_rank(folder: RunFolder, policy: str, place: Place, playing: frozenset[int]) -> int:
    name = f"trainer-{policy}"
    if place.rank == 0:  # it speaks for all ranks
        startup.report_to(folder.root, name, "importing torch")
    from rillflow.trainer.main import Access, run_trainer
    from rillflow.trainer.parallel import GivenUp, PeerLost
    from rillflow.trainer.parallel.launch import LEFT_ALONE
    from rillflow.trainer.stream import NoBatch

    recipe = folder.recipe
    _use_threads(recipe.runtime.threads)
    url = asyncio.run(wait_for_run(folder))
    plays = place.rank in playing

    def train(generator: Generator | None = None) -> bool:
        return run_trainer(
            recipe,
            policy,
            folder.root,
            dataflow_url=url,
            access=Access.of_run(folder.token),
            on_ready=lambda own: folder.publish_endpoint(name, own),
            generator=generator,
            place=place,
            spans=spans,
        )

    # Rank 0 of a trainer of several is a predecessor, too, of one that has no launcher to hold the trainer's own lock.
    with ExitStack() as stack:
        for lock in ([name] if place.ranks == 1 else []) + [f"{name}-rank{place.rank}"]:
            stack.enter_context(folder.locked(lock, PREDECESSOR_WAIT))
        spans = open_spans(folder.root, name if place.ranks == 1 else f"{name}-rank{place.rank}")
        stack.callback(spans.close)
        try:
            finished = _train_and_play(folder, place, url, train, spans, plays=plays) if playing else train()
        except NoBatch as error:
            raise GiveUp(error.message, error.hint) from error
        except (GivenUp, PeerLost) as error:
            log.error("%s", error)
            code = LEFT_ALONE
        else:
            code = 0 if finished else STOPPED
    if plays or code == LEFT_ALONE:
        leave(code)
    return code


def _train_and_play(
    folder: RunFolder, place: Place, url: str, train: Callable[[Generator], bool], spans: Spans, *, plays: bool
) -> bool:
    """Train in a trainer of which some ranks also play. Only such a trainer imports what nodes import."""
    from rillflow.runtime.hosted import Rests, run_hosted

    return run_hosted(folder, f"colocated-{place.rank}", url, train, spans) if plays else train(Rests())


def _check_name(name: str) -> None:
    """Names of processes become names of files."""
    if not _NAME.fullmatch(name):
        raise RunError(f"{name!r} is not a name of a process", "use letters, digits, dots, dashes and underscores")


def _use_threads(threads: int) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


async def wait_for_run(folder: RunFolder) -> str:
    """Return the run's address (`clients.ledgers`) once all ledgers listen; RunError when one does not in time."""
    recipe = folder.recipe
    urls = [await wait_for_endpoint(folder, process_of(number)) for number in range(recipe.dataflow.ledgers)]
    return ",".join(urls)


async def wait_for_endpoint(folder: RunFolder, process: str) -> str:
    """Return the address of `process`; raises RunError if it is not published in time."""
    startup.doing(f"waiting for the {process} service")
    deadline = asyncio.get_running_loop().time() + _ENDPOINT_WAIT
    while (url := folder.endpoint(process)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise RunError(f"waited {_ENDPOINT_WAIT:.0f} s for {process} to start", f"see {folder.log(process)}")
        await asyncio.sleep(0.1)
    return url
