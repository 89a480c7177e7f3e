"""The run folder: all files of a run, enough to resume it.

recipe.yaml      the resolved recipe            logs/            one file per process
run.json         token, versions, start time    endpoints/       where each service listens
state.json       running, finished, …           ledger.sqlite    states of everything (dataflow)
metrics.jsonl    one line per step              units/           payloads (storage units)
weights/         published versions             checkpoints/     trainers' own
workers.json     workers, tags, assignments     timeline/        who did what when
gateway/         sessions, one folder per node  tensorboard/     event files
starting/        what each process does         trackers/        what each tracker was sent
ledgers/         the second ledger, the third … of a run that has several
trajectories.sqlite  episodes kept for people
profiles/        torch's profiles of steps
reward.png, summary.json at the end
"""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

from rillflow import __version__
from rillflow.config import Recipe, write_resolved
from rillflow.config.load import read_resolved
from rillflow.config.supervised import FitRecipe
from rillflow.errors import RunError
from rillflow.resources.workers import WorkersFile
from rillflow.storage import disk_errors, read_json, write_json
from rillflow.storage.files import LockHeld, is_held, locked
from rillflow.types import TokenScope
from rillflow.types.runs import folder_of, process_of
from rillflow.wire.tokens import Keyring, scoped_token

_LEDGER = "ledger.sqlite"
State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    root: Path

    @classmethod
    def create(cls, recipe: Recipe | FitRecipe, parent: Path, *, now: float | None = None) -> RunFolder:
        """Create a folder with the resolved recipe, a new token and the versions of the installed packages."""
        now = time.time() if now is None else now
        wanted = parent / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        with disk_errors(wanted):
            root = _make_unused(wanted).resolve()
            for name in ("logs", "endpoints"):
                (root / name).mkdir()
        write_resolved(recipe, root / "recipe.yaml")
        # The token is the operator's, from which all others are made: only its owner may read it. The folder was made
        # closed; it gets the rights that new folders have here.
        ledgers = recipe.dataflow.ledgers if isinstance(recipe, Recipe) else 1
        known = {"token": secrets.token_urlsafe(32), "started": now, "ledgers": ledgers, **_versions()}
        write_json(root / "run.json", known, private=True)
        os.chmod(root, (root / "logs").stat().st_mode & 0o777)
        return cls(root)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        root = Path(path).resolve()
        if not (root / "recipe.yaml").is_file() or not (root / "run.json").is_file():
            why = "it has no recipe.yaml and run.json" if root.is_dir() else "the folder does not exist"
            raise RunError(
                f"{path} is not a run folder: {why}",
                "give a folder that `rillflow run` made, such as runs/…; `rillflow top` lists them",
            )
        return cls(root)

    @property
    def recipe(self) -> Recipe:
        return read_resolved(self.root / "recipe.yaml")

    @property
    def token(self) -> str:
        """The run's own token: the operator's, which opens every route."""
        return str(read_json(self.root / "run.json")["token"])

    @property
    def started(self) -> float:
        """When the folder was made, in seconds since the epoch."""
        return float(read_json(self.root / "run.json")["started"])

    def token_of(self, scope: TokenScope) -> str:
        return scoped_token(self.token, scope)

    @property
    def keyring(self) -> Keyring:
        return Keyring.of_run(self.token)

    @property
    def ledger(self) -> Path:
        return self.root / _LEDGER

    @property
    def ledgers(self) -> list[Path]:
        """The files of all ledgers of the run, the first one's first."""
        return [folder_of(self.root, number) / _LEDGER for number in range(self._ledger_count)]

    @property
    def _ledger_count(self) -> int:
        return int(read_json(self.root / "run.json").get("ledgers", 1))

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def workers(self) -> WorkersFile:
        return WorkersFile(self.root)

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def weights(self, policy: str) -> Path:
        return self.root / "weights" / policy

    def gateway(self, node: str) -> Path:
        """A node's own folder: its sessions, and where its agents run."""
        path = self.root / "gateway" / node
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def checkpoints(self, policy: str) -> Path:
        return self.root / "checkpoints" / policy

    # ------------------------------------------------------------ end state

    def state(self) -> dict[str, Any]:
        path = self.root / "state.json"
        return dict(read_json(path)) if path.is_file() else {"state": "new", "reason": ""}

    def set_state(self, state: State, reason: str = "") -> None:
        write_json(self.root / "state.json", {"state": state, "reason": reason, "time": time.time()})

    # ------------------------------------------------------------ endpoints

    def publish_endpoint(self, process: str, url: str) -> None:
        write_json(self.root / "endpoints" / f"{process}.json", {"url": url, "pid": os.getpid()})

    def endpoint(self, process: str) -> str | None:
        path = self.root / "endpoints" / f"{process}.json"
        return str(read_json(path)["url"]) if path.is_file() else None

    @property
    def address(self) -> str | None:
        """Where the run's ledgers listen (`clients.ledgers`); None while one of them has not said so."""
        urls = [self.endpoint(process_of(number)) for number in range(self._ledger_count)]
        known = [url for url in urls if url is not None]
        return ",".join(known) if len(known) == len(urls) else None

    def last_port(self, process: str) -> int:
        """Return the port a process had before, so that its peers find it again; 0 if it is new."""
        url = self.endpoint(process)
        return int(url.rsplit(":", 1)[1]) if url else 0

    def dashboard_url(self, base: str) -> str:
        """Return the dashboard's address for a browser, with the reader's token, which only reads."""
        return f"{base}/?token={self.token_of('reader')}"

    def forget_endpoint(self, process: str) -> None:
        (self.root / "endpoints" / f"{process}.json").unlink(missing_ok=True)

    # ------------------------------------------------------------ one of each at a time

    def is_running(self) -> bool:
        """Return whether a supervisor on this machine runs it now."""
        return is_held(self.root / ".lock")

    @contextmanager
    def locked(self, process: str = "", wait: float = 0.0) -> Iterator[None]:
        """Hold the lock of the supervisor, or of the process of that name; the operating system releases it when it
        dies.

        `wait` seconds are left to a predecessor that is still on its way out.
        """
        path = self.root / (f".lock-{process}" if process else ".lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path, wait))
            except LockHeld:
                what = f"is {process} of" if process else "is running"
                raise RunError(
                    f"another process {what} {self.root}", "wait for it to end, or stop it with Ctrl-C"
                ) from None
            yield

    @property
    def held(self) -> bool:
        """Return whether a supervisor of this machine holds the run. The check itself takes the lock for a moment and
        may make a concurrent resume fail: use it only if the run's state is running."""
        try:
            with locked(self.root / ".lock"):
                return False
        except LockHeld:
            return True


def _make_unused(path: Path) -> Path:
    """Create a folder of this name, or of this name and a number: each caller gets its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for count in itertools.count(1):
        candidate = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with suppress(FileExistsError):
            candidate.mkdir(mode=0o700)
            return candidate
    raise AssertionError("not reached")


def _versions() -> dict[str, Any]:
    packages = {"rillflow": __version__, "torch": _installed("torch"), "transformers": _installed("transformers")}
    return {"versions": {"python": platform.python_version(), **packages}, "machine": platform.machine()}


def _installed(package: str) -> str:
    """Return the installed version of a package; one that is imported from a path has none."""
    try:
        return installed(package)
    except PackageNotFoundError:
        return "absent"
