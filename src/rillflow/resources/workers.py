"""The workers of a run: their tags, their hardware with its roofline, and their assignments.

Invariants: names are unique; a worker with one role has the name of its process (rollout-0, trainer-agent).
RUN/workers.json is written atomically, and a lock covers reading and writing. Its content is checked when it is read,
because people edit it by hand.

The classical roofline says how well a worker is suited to training and to rollout. A device with peak compute P and
memory bandwidth B attains min(P, I * B) FLOP/s on work that does I FLOP for each byte it moves; beyond the ridge point
P / B it is bound by compute, below it by memory. Training multiplies large matrices and reuses every byte hundreds of
times: it attains P. Decoding reads all weights and the cache for each token of a batch: it attains
D = min(P, DECODE_INTENSITY * B). So

    train_priority = P * (P / D)

the training rate times its ratio to the decoding rate: the absolute and the comparative advantage. It is strictly
increasing in P and never increasing in B; so of {high compute, low bandwidth} and {low compute, high bandwidth} the
first trains, and of two devices that differ only in size the larger.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import Recipe
from rillflow.config.runs import Tag, WorkersConfig
from rillflow.errors import RunError
from rillflow.storage import read_json, write_json
from rillflow.storage.files import LockHeld, locked

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- the roofline

# FLOP for each byte of weights and cache: a batch of a few sequences, or query heads that share their keys, in bf16.
DECODE_INTENSITY = 8.0
_DEADLINE = 60.0  # seconds for a measurement in a process of its own; nearly all of it is for loading torch
_SIZE_CPU, _SIZE_GPU = 512, 8192
_BYTES_CPU, _BYTES_GPU = 64 << 20, 1 << 30
_ROUNDS = 5


@dataclass(frozen=True)
class Roofline:
    """Peak compute in TFLOP/s and memory bandwidth in GB/s, both above 0."""

    tflops: float
    bandwidth: float

    def attainable(self, intensity: float) -> float:
        """Return the attainable TFLOP/s at `intensity` FLOP a byte."""
        return min(self.tflops, intensity * self.bandwidth / 1e3)

    @property
    def ridge(self) -> float:
        """The intensity in FLOP a byte above which compute is the bound."""
        return self.tflops * 1e3 / self.bandwidth

    @property
    def train_priority(self) -> float:
        return self.tflops * (self.tflops / self.attainable(DECODE_INTENSITY))


def measure(threads: int = 1) -> Roofline:
    """Measure the first GPU, or `threads` cores. Takes well under a second once torch is imported.

    The best of a few rounds counts: a disturbance makes a round slower, never faster.
    """
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if threads and not gpu:
        torch.set_num_threads(threads)
    size = _SIZE_GPU if gpu else _SIZE_CPU
    left = torch.ones(size, size, dtype=torch.bfloat16 if gpu else torch.float32, device=device)
    product = torch.empty_like(left)
    source = torch.zeros(_BYTES_GPU if gpu else _BYTES_CPU, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    multiply = _best(lambda: torch.mm(left, left, out=product), wait)
    copy = _best(lambda: target.copy_(source), wait)
    return Roofline(2 * size**3 / multiply / 1e12, 2 * source.numel() / copy / 1e9)


def _best(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of the fastest round; the first one warms up and does not count."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def measure_apart(threads: int) -> Roofline:
    """Run `measure` in a subprocess with a deadline: the caller needs no torch, and no driver can hang it."""
    command = [sys.executable, "-m", "rillflow.resources.workers", "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE, check=True)
        values = json.loads(done.stdout)
        return Roofline(float(values["tflops"]), float(values["bandwidth"]))
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        raise RunError(
            f"this machine could not be measured: {error}", "declare tflops and bandwidth in resources.workers"
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine's peak compute and memory bandwidth.")
    parser.add_argument("--threads", type=int, default=1)
    found = measure(parser.parse_args().threads)
    print(json.dumps({"tflops": found.tflops, "bandwidth": found.bandwidth}))


# ---------------------------------------------------------------- workers

TAGS: tuple[Tag, ...] = ("rollout", "train")
_FORMAT = 1
_LOCK_WAIT = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of a machine that can play, train, or both.

    `policy` is the one that it trains. `where` is its host, empty for that of the run. A `lost` worker's process could
    not be kept alive or has left the run; it is left out until its tags are set again. `process` and `rank` are its
    present assignment; a spare worker has no process.
    """

    name: str
    tags: frozenset[Tag]
    policy: str
    tflops: float | None = None
    bandwidth: float | None = None
    where: str = ""
    lost: bool = False
    process: str = ""
    rank: int | None = None

    @property
    def priority(self) -> float | None:
        """The train priority by its roofline; None if that is unknown."""
        if self.tflops is None or self.bandwidth is None:
            return None
        return Roofline(self.tflops, self.bandwidth).train_priority


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content. `recipe` are the workers that the recipe asked for: if it changes, the workers are
    replaced."""

    format: int
    workers: list[Worker]
    recipe: list[Worker]


def initial_workers(recipe: Recipe) -> list[Worker]:
    """Return the workers that a recipe asks for, by `resources.workers` or `runtime.mode`."""
    kinds = recipe.resources.workers
    if kinds is None:
        kinds = list(_by_mode(recipe))
    singles = [kind for kind in kinds for _ in range(kind.count)]
    trainers = Counter(kind.policy or recipe.policy for kind in singles if "train" in kind.tags)
    numbers: Counter[str] = Counter()

    def name(kind: WorkersConfig) -> str:
        policy = kind.policy or recipe.policy
        prefix = f"trainer-{policy}-rank" if "train" in kind.tags else "rollout-"
        numbers[prefix] += 1
        alone = "train" in kind.tags and trainers[policy] == 1
        return f"trainer-{policy}" if alone else f"{prefix}{numbers[prefix] - 1}"

    return [
        Worker(
            name=name(kind),
            tags=frozenset(kind.tags),
            policy=kind.policy or recipe.policy,
            tflops=kind.tflops,
            bandwidth=kind.bandwidth,
        )
        for kind in singles
    ]


def _by_mode(recipe: Recipe) -> Iterator[WorkersConfig]:
    both: list[Tag] = ["rollout", "train"]
    for policy, settings in recipe.policies.items():
        tags = ["train"] if recipe.mode == "asynchronous" else both
        yield WorkersConfig(tags=tags, count=settings.trainer.ranks, policy=policy)
    if recipe.mode != "colocated":
        yield WorkersConfig(tags=["rollout"], count=recipe.rollout.nodes)


class WorkersFile:
    """RUN/workers.json."""

    def __init__(self, root: Path) -> None:
        self.path = root / "workers.json"
        self._lock = root / ".lock-workers"

    def prepare(self, recipe: Recipe) -> list[Worker]:
        """Return the workers at the start of a run: from the recipe, or from the file of a resumed run.

        Lost workers are tried again. A changed recipe wins over the file.
        """
        wanted = initial_workers(recipe)
        with self._locked():
            if self.path.is_file() and (left := self._read()).recipe == wanted:
                return self._write([msgspec.structs.replace(worker, lost=False) for worker in left.workers], wanted)
            return self._write(wanted, wanted)

    def read(self) -> list[Worker]:
        return self._read().workers

    def change(self, change: Callable[[list[Worker]], Iterable[Worker]]) -> list[Worker]:
        """Replace the workers by the result of `change`; if it raises, nothing changes."""
        with self._locked():
            file = self._read()
            changed = list(change(file.workers))
            return changed if changed == file.workers else self._write(changed, file.recipe)

    def stamp(self) -> tuple[int, int] | None:
        """Return a value that differs once the file is replaced; None if the file is missing."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _read(self) -> _File:
        if not self.path.is_file():
            raise RunError(f"{self.path} is not there", "it is made when the run starts: `rillflow run` or `resume`")
        try:
            file = msgspec.convert(read_json(self.path), _File)
        except msgspec.ValidationError as error:
            raise RunError(f"{self.path}: {error}", "undo the last change to it, or remove it and resume") from None
        _check(file, self.path)
        return file

    def _write(self, workers: list[Worker], recipe: list[Worker]) -> list[Worker]:
        write_json(
            self.path,
            {"format": _FORMAT, "workers": [_plain(w) for w in workers], "recipe": [_plain(w) for w in recipe]},
        )
        return workers

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._lock, _LOCK_WAIT))
            except LockHeld:
                raise RunError(f"another process has held {self._lock} for {_LOCK_WAIT:.0f} s", "try again") from None
            yield


def _plain(worker: Worker) -> dict[str, Any]:
    """Tags in order, so that the same workers are the same bytes."""
    return msgspec.structs.asdict(worker) | {"tags": sorted(worker.tags)}


def _check(file: _File, path: Path) -> None:
    if file.format != _FORMAT:
        raise RunError(f"{path} has format {file.format}, not {_FORMAT}", "use the Rillflow that wrote it")
    names = [worker.name for worker in file.workers]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise RunError(f"{path} names {twice[0]} twice", "each worker stands there once")
    for worker in file.workers:
        if not _NAME.fullmatch(worker.name):
            raise RunError(f"{path}: {worker.name!r} is not a name", "use letters, digits, dots, dashes, underscores")
        for number in (worker.tflops, worker.bandwidth):
            if number is not None and not 0 < number < float("inf"):
                raise RunError(f"{path}: {worker.name} has {number} TFLOP/s or GB/s", "give a number above 0")


def find(workers: Sequence[Worker], name: str) -> Worker:
    for worker in workers:
        if worker.name == name:
            return worker
    raise RunError(f"unknown worker {name!r}", f"one of: {', '.join(worker.name for worker in workers)}")


Measure = Callable[[int], Roofline]


def measured(recipe: Recipe, workers: Sequence[Worker], measure: Measure = measure_apart) -> list[Worker]:
    """Return workers with their rooflines, if more of them can train a policy than it needs and some are unknown.

    Workers on this machine share one measurement. If it fails, the order of the recipe decides.
    """
    unknown = [worker for worker in workers if "train" in worker.tags and worker.priority is None]
    if not unknown or not _choice(recipe, workers):
        return list(workers)
    try:
        return remeasured(recipe, workers, measure)
    except RunError as error:
        log.warning("%s", error)
        return list(workers)


def remeasured(recipe: Recipe, workers: Sequence[Worker], measure: Measure = measure_apart) -> list[Worker]:
    """Return workers of this machine with a new measurement; declared numbers stay."""
    found = measure(recipe.runtime.threads)
    declared = {worker.name: worker for worker in initial_workers(recipe)}

    def told(worker: Worker) -> Worker:
        said = declared.get(worker.name, worker)
        return msgspec.structs.replace(
            worker, tflops=said.tflops or found.tflops, bandwidth=said.bandwidth or found.bandwidth
        )

    return [worker if worker.where else told(worker) for worker in workers]


def _choice(recipe: Recipe, workers: Sequence[Worker]) -> bool:
    able = Counter(worker.policy for worker in workers if "train" in worker.tags)
    return any(able[name] > policy.trainer.ranks for name, policy in recipe.policies.items())


def with_rooflines(workers: Sequence[Worker], known: Sequence[Worker]) -> list[Worker]:
    """Return the workers with the rooflines of those of the same name in `known`."""
    numbers = {worker.name: (worker.tflops, worker.bandwidth) for worker in known}
    return [
        msgspec.structs.replace(worker, tflops=tflops, bandwidth=bandwidth)
        for worker in workers
        for tflops, bandwidth in [numbers.get(worker.name, (worker.tflops, worker.bandwidth))]
    ]


if __name__ == "__main__":
    main()
