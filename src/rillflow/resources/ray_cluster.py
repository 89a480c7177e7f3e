"""A Ray cluster as a run sees it: the resources of its nodes, the actors that host processes, and their seats.

An actor hosts one process of a run on its host, reports its state and hands over its output. The process is a child of
the actor, in its own session: a crash in it does not affect Ray, and it keeps its signals. It dies with the actor. Its
output goes to a file on its host, which outlives the actor: the next actor of that name there continues it, so that no
output is lost or handed over twice.

Tags are custom resources: a Ray node that may roll out offers `rollout`, one that may train `train`, as many of each as
it has room for workers. If no node offers any of them, every worker takes a CPU instead. GPUs are requested in
addition, if the cluster has some and the recipe does not want the CPU.

Ray pickles every argument: only strings, numbers and Ray's own errors cross it; structures are JSON. This module
imports Ray where it is used, and never torch, so that an actor is light and tests need no cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rillflow.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rillflow.config import Recipe

log = logging.getLogger(__name__)

FOLDER = "{folder}"  # in an argument: the folder that the process may keep things in
CHUNK = 1 << 16  # bytes of a log that one answer holds
_PARENT_ENV = "RILLFLOW_PARENT"  # a role's process ends when this one has gone
_LOOK = 1.0


class RoleHost:
    """Hosts one process at a time, `name` of the run `run`. All methods return within moments."""

    program = (sys.executable, "-m", "rillflow")

    def __init__(self, name: str, run: str, log: str = "log", linger: float = 0.0) -> None:
        """`log` is another one for each driver of the run. With `linger`, the actor exits that number of seconds after
        its process: for detached actors."""
        self._folder = own_folder(run) / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._log = self._folder / f"{log}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._looking = threading.Lock()
        if linger:
            threading.Thread(target=self._expire, args=(linger,), name="linger", daemon=True).start()

    def folder(self) -> str:
        """Return the process's folder; it stays for the next process of this name on this host."""
        return str(self._folder)

    def free_port(self, address: str) -> int:
        """Return a free port for the ranks' rendezvous. If another process takes it meanwhile, the ranks restart."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def start(self, spec: str) -> int:
        """Start `rillflow ARGUMENTS…` and return the id of its process.

        `spec`: {"arguments": [...], "environment": {...} (added to the actor's), "cwd": …, where this host has it}.
        """
        wanted: dict[str, Any] = json.loads(spec)
        if self._process is not None and self.running():
            raise RunError(f"a process runs here already (id {self._process.pid})", "end it first")
        arguments = [word.replace(FOLDER, str(self._folder)) for word in wanted["arguments"]]
        cwd = wanted.get("cwd", "")
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [*self.program, *arguments],
                cwd=cwd if os.path.isdir(cwd) else self._folder,
                env=dict(os.environ) | wanted["environment"] | {_PARENT_ENV: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self._process.pid

    def look(self, log: str, offset: int) -> str:
        """Return the process's exit code (null while it runs) and the next piece of its output, decoded as latin-1.

        `log` and `offset` are those of the last answer; a log that has been replaced since is read from its beginning.
        """
        code = self._code()  # before the log, so that the log is read to its end after the process has ended
        if not self._log.exists():
            return json.dumps({"code": code, "log": "", "offset": 0, "text": "", "more": False})
        with open(self._log, "rb") as file:
            status = os.fstat(file.fileno())
            now = f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
            begin = offset if log == now and offset <= status.st_size else 0
            file.seek(begin)
            text = file.read(CHUNK)
        end = begin + len(text)
        more = end < status.st_size
        return json.dumps({"code": code, "log": now, "offset": end, "text": text.decode("latin-1"), "more": more})

    def tail(self) -> str:
        """Return the end of its output."""
        if not self._log.exists():
            return ""
        with open(self._log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - CHUNK))
            return file.read(CHUNK).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Signal the process group."""
        if self._process is not None and self.running():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def running(self) -> bool:
        return self._process is not None and self._code() is None

    def forget(self) -> None:
        """Remove the folder of a process that will not come back."""
        self.signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _code(self) -> int | None:
        with self._looking:
            if self._process is None:
                return None
            known = self._process.returncode is not None
            code = self._process.poll()
            if code is not None and not known:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its remaining children
            return code

    def _expire(self, linger: float) -> None:
        """End an actor whose process has ended, or that never got one."""
        last = time.monotonic()
        while time.monotonic() - last < linger:
            time.sleep(_LOOK)
            if self.running():
                last = time.monotonic()
        self.forget()
        os._exit(0)


def own_folder(run: str) -> Path:
    """Return the folder of this user's processes of a run on this host, closed to others."""
    parent = Path(tempfile.gettempdir()) / f"rillflow-{os.getuid()}"
    for path in (parent, parent / run):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RunError(
                f"{path} is open to other users, or belongs to one", "remove it, or set TMPDIR to another folder"
            )
    return parent / run


# ---------------------------------------------------------------- the cluster

TAGS = ("rollout", "train")
CALL = 10.0  # seconds that an actor has for an answer
_START = 60.0  # for a placed actor's worker process to come up
_POLL = 0.5
# A cluster that is started for one run has room for as many workers as the recipe, or a change of tags, may want.
_ROOM_AT_HOME = 1024

Wants = Mapping[str, float]


class SeatLost(Exception):
    """An actor was lost, with its worker process or with its node. `nodes` are those that may be the cause."""

    def __init__(self, message: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


@dataclass(frozen=True)
class Offers:
    """The resources of a cluster's live nodes, in total and per node."""

    nodes: tuple[Mapping[str, float], ...]

    @property
    def tagged(self) -> bool:
        return any(tag in node for node in self.nodes for tag in TAGS)

    @property
    def gpus(self) -> bool:
        return any(node.get("GPU", 0) > 0 for node in self.nodes)

    def __str__(self) -> str:
        """Describe each node, without the resources that every node has."""
        shown = [{k: v for k, v in node.items() if k in ("CPU", "GPU", *TAGS)} for node in self.nodes]
        return "; ".join(describe(node) for node in shown)


def namespace_of(run: str) -> str:
    """Return the namespace of a run's named actors."""
    return f"rillflow-{run}"


def describe(resources: Wants) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "nothing"


def wants_of(tags: Sequence[Literal["rollout", "train"]], offers: Offers, gpus: int) -> dict[str, float]:
    """Return the resources that one worker with these tags requests."""
    wanted = dict.fromkeys(tags, 1.0) if offers.tagged else {"CPU": 1.0}
    return wanted | ({"GPU": float(gpus)} if gpus and offers.gpus else {})


def sampling_gpus(recipe: Recipe) -> int:
    """Return the GPUs of a worker that samples: the engines of all policies share them."""
    engines = [policy.engine for policy in recipe.policies.values() if policy.engine.server.url is None]
    on_cpu = [engine.kind == "embedded" and engine.device == "cpu" for engine in engines]
    return max(
        (0 if cpu else engine.server.tensor_parallel for engine, cpu in zip(engines, on_cpu, strict=True)), default=0
    )


def training_gpus(recipe: Recipe, policy: str) -> int:
    return 0 if recipe.policies[policy].trainer.device == "cpu" else 1


class Seat:
    """An actor on a node, which hosts one process."""

    def __init__(self, actor: Any, node: str, address: str) -> None:
        self._actor = actor
        self.node = node
        self.address = address
        self.pid = 0

    async def call(self, method: str, *arguments: str | float) -> Any:
        """Call the actor. Raises SeatLost if it has gone, TimeoutError if it does not answer in time."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        try:
            return await asyncio.wait_for(_answer(getattr(self._actor, method).remote(*arguments)), CALL)
        except ActorUnavailableError as error:
            raise TimeoutError(str(error)) from error
        except RayActorError as error:
            raise SeatLost(str(error).partition("\n")[0], (self.node,)) from error

    def tell(self, method: str, *arguments: str | float) -> None:
        """Call the actor without waiting for an answer."""
        getattr(self._actor, method).remote(*arguments)

    def vacate(self) -> None:
        import ray

        ray.kill(self._actor)


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


class RayCluster:
    """The cluster that this process is connected to. One at a time."""

    def __init__(self, run: str, incarnation: str) -> None:
        """`run` names the folders of processes on their hosts, `incarnation` the logs of those that this driver
        starts."""
        self._run = run
        self._incarnation = incarnation
        self._groups: dict[int, Any] = {}
        self._connected = False

    def connect(self, address: str | None, namespace: str) -> None:
        """Connect to an existing cluster, or to one that is started on this machine and ends with this process."""
        connect(address, namespace)
        self._connected = True

    @property
    def address(self) -> str:
        """Return the address at which the cluster can be joined."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    @property
    def own_address(self) -> str:
        """Return this host's address, as the other nodes know it."""
        import ray

        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    async def offers(self) -> Offers:
        return await asyncio.to_thread(offers)

    async def is_alive(self, node: str) -> bool:
        return any(entry["NodeID"] == node for entry in await asyncio.to_thread(_alive))

    async def place(self, names: Sequence[str], wants: Sequence[Wants], still: Callable[[float], bool]) -> list[Seat]:
        """Return seats for processes that are placed together, as close to each other as resources allow; an empty
        list once `still(seconds waited)` is false. Raises SeatLost if a node is lost meanwhile."""
        import ray
        from ray.util import placement_group, placement_group_table, remove_placement_group

        began = time.monotonic()
        group = await asyncio.to_thread(placement_group, [dict(w) for w in wants], "PACK")
        try:
            while (table := await asyncio.to_thread(placement_group_table, group))["state"] != "CREATED":
                if not still(time.monotonic() - began):
                    await asyncio.to_thread(remove_placement_group, group)
                    return []
                await asyncio.sleep(_POLL)
            addresses = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in await asyncio.to_thread(ray.nodes)}
            seats = [
                Seat(
                    _actor(name, wanted, self._run, self._incarnation, _bundle(group, index)),
                    node := table["bundles_to_node_id"][index],
                    addresses[node],
                )
                for index, (name, wanted) in enumerate(zip(names, wants, strict=True))
            ]
            self._groups[id(seats[0])] = group
            await asyncio.wait_for(asyncio.gather(*(_up(seat) for seat in seats)), _START)
        except BaseException:
            remove_placement_group(group)  # ends its actors too
            raise
        return seats

    async def leave(self, seats: Sequence[Seat]) -> None:
        """Give the seats back; processes that still run there end."""
        from ray.util import remove_placement_group

        for seat in seats:
            seat.vacate()
        group = self._groups.pop(id(seats[0]), None)
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)

    def close(self) -> None:
        """End all actors of this driver."""
        if self._connected:
            import ray

            ray.shutdown()


async def _up(seat: Seat) -> None:
    """Wait for the actor's first answer, which takes as long as Ray needs to start a worker process."""
    while True:
        try:
            await seat.call("folder")
            return
        except TimeoutError:
            continue


def _bundle(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _actor(name: str, wanted: Wants, run: str, incarnation: str, strategy: Any) -> Any:
    import ray

    options = actor_resources(wanted) | {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy}
    return ray.remote(RoleHost).options(**options).remote(name, run, incarnation)


def actor_resources(wanted: Wants) -> dict[str, Any]:
    """Return the resources as options of an actor."""
    custom = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": custom}


def connect(address: str | None, namespace: str) -> None:
    """Connect to Ray. Raises ConfigError if it is not installed or `address` is unusable, RunError if it does not
    answer."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", "pip install 'rillflow[ray]', on every node of the cluster"
        ) from error
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if "://" in address:
        raise ConfigError(
            f"{address}: a Ray client is on no node of its cluster, and a run needs one for its own folder",
            "run this command on a node of the cluster (ray job submit -- rillflow run …) with --address HOST:PORT",
        )
    at_home: dict[str, Any] = {
        "resources": dict.fromkeys(TAGS, _ROOM_AT_HOME),
        "include_dashboard": False,
        "object_store_memory": 80 << 20,  # nothing of a run lies there
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers are what the machine is for
    try:
        ray.init(
            address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
            **(at_home if address == "local" else {}),
        )
    except Exception as error:  # of many kinds, some of no kind of their own
        what = "a Ray cluster did not start here" if address == "local" else f"no Ray cluster answers at {address}"
        raise RunError(
            f"{what}: {error}", "see `ray status`, and whether the machine has memory and cores left"
        ) from error


def offers() -> Offers:
    return Offers(tuple(entry["Resources"] for entry in _alive()))


def _alive() -> list[dict[str, Any]]:
    import ray

    return [entry for entry in ray.nodes() if entry["Alive"]]  # type: ignore[no-untyped-call]
