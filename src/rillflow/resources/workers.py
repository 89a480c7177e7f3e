"""The workers of a run: what each can do, what it has, and what the run has it do.

Invariants: names are unique, and are those of the processes that the workers run where each has but one role
(rollout-0, trainer-agent); RUN/workers.json is always whole, and who changes it changes what is there now (a lock
around reading and writing); what is read from it is checked, for people edit it by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import Recipe
from rillflow.config.resources import Tag, WorkersConfig
from rillflow.errors import RunError
from rillflow.resources.roofline import Roofline
from rillflow.storage import read_json, write_json
from rillflow.storage.locks import LockHeld, locked

TAGS: tuple[Tag, ...] = ("rollout", "train")
_FORMAT = 1
_LOCK_WAIT = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of a machine that can play, train, or both.

    `policy` is the one that it trains when it does. `where` is its host, empty for that of the run. `lost`: what it
    ran could not be kept alive, or has left the run, and it is left out until its tags are set anew. `process` and
    `rank` are what the run has it do at present; a spare worker has no process.
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
        """How much better it is put to training than to rollout, by its roofline; None where that is not known."""
        if self.tflops is None or self.bandwidth is None:
            return None
        return Roofline(self.tflops, self.bandwidth).train_priority


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`recipe` are the workers that the recipe came to: when it says something else, they are made anew."""

    format: int
    workers: list[Worker]
    recipe: list[Worker]


def initial_workers(recipe: Recipe) -> list[Worker]:
    """The workers that a recipe asks for, by `resources.workers` or by one word (`runtime.mode`)."""
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
        """At the start of a run: made from the recipe, or, of a run that is resumed, as it was left.

        Those that were lost are tried again. A recipe that was changed meanwhile wins over what was left.
        """
        wanted = initial_workers(recipe)
        with self._locked():
            if self.path.is_file() and (left := self._read()).recipe == wanted:
                return self._write([msgspec.structs.replace(worker, lost=False) for worker in left.workers], wanted)
            return self._write(wanted, wanted)

    def read(self) -> list[Worker]:
        return self._read().workers

    def change(self, change: Callable[[list[Worker]], Iterable[Worker]]) -> list[Worker]:
        """Replace the workers by what `change` makes of them; when it raises, nothing has changed."""
        with self._locked():
            file = self._read()
            changed = list(change(file.workers))
            return changed if changed == file.workers else self._write(changed, file.recipe)

    def stamp(self) -> tuple[int, int] | None:
        """Differs when the file was replaced; None where there is none."""
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
    raise RunError(f"there is no worker {name!r}", f"one of: {', '.join(worker.name for worker in workers)}")
