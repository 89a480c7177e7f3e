"""A trainer that is killed (SIGKILL) again and again, each time at an exact place: `python killed_trainer.py RUN PLAN`.

Everything is loaded once and every life is a fork. PLAN is a JSON list of [moment, n]: the life dies when it comes to
the moment for the n-th time; one more, without a moment, ends by itself. After each death the files that it left are
looked at: what is visible must be whole. Prints one JSON line a life.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  (loaded here, once)

from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import PARENT_ENV
from rillflow.runtime.roles import trainer_role
from rillflow.trainer import main  # noqa: F401
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.loop import TrainerLoop
from rillflow.trainer.remote_stream import RemoteStream
from rillflow.weights import FolderStore, sealed
from rillflow.weights.delta import apply, encode


class Death:
    """Comes at the n-th time that the process is at its moment, counted from when the trainer has joined."""

    def __init__(self, moment: str, times: int) -> None:
        self._moment = moment
        self._left = times
        self._armed = False

    def at(self, moment: str) -> None:
        if self._armed and moment == self._moment:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def lurk(self) -> None:
        """Wait at every moment of a step, a checkpoint and a publication."""
        around(RemoteStream, "join", after=lambda *_: setattr(self, "_armed", True))
        around(TrainerLoop, "_check", before=lambda *_: self.at("step: computing"))
        around(RemoteStream, "commit", before=lambda *_: self.at("step: updated"))
        around(RemoteStream, "commit", after=lambda *_: self.at("step: committed"))
        around(sealed, "_write", before=self._half_written)
        around(sealed, "_rename", before=lambda temporary, target: self.at(f"{kind(target)}: all but visible"))
        around(sealed, "_rename", after=lambda temporary, target: self.at(f"{kind(target)}: visible"))
        around(sealed, "remove", before=lambda folder: self.at(f"{kind(folder)}: cleaning up"))
        around(FolderStore, "_move", after=lambda *_: self.at("publish: head moved"))

    def _half_written(self, path: Path, content: Any) -> None:
        if path.name.endswith((".safetensors", ".rfd")):
            path.with_name(path.name + ".half").write_bytes(b"half a file")
            self.at(f"{kind(path)}: half written")
            path.with_name(path.name + ".half").unlink()


def kind(path: Path) -> str:
    return "checkpoint" if "checkpoints" in path.parts else "publish"


def nothing(*arguments: Any) -> None:
    pass


def around(owner: Any, name: str, before: Callable[..., Any] = nothing, after: Callable[..., Any] = nothing) -> None:
    inner = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = inner(*arguments, **options)
        after(*arguments)
        return result

    setattr(owner, name, wrapped)


def apart(work: Callable[[], int]) -> int:
    """How `work` in a fork ended: minus the signal, or its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load_codec() -> None:
    """What encodes and decodes deltas is compiled once, for all lives. In one thread: others would be missing in forks
    while torch believes that it has them."""
    torch.set_num_threads(1)
    base = torch.ones(4096)
    new = base.clone()
    new[::64] += 1
    new[1::64] *= -3
    apply(base, encode(base, new).data)


def live(folder: RunFolder, policy: str, moment: str | None, times: int) -> int:
    """The trainer, until it dies at its moment."""
    log = os.open(folder.log(f"trainer-{policy}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    if moment is not None:
        Death(moment, times).lurk()
    return trainer_role(folder, policy)


def look(folder: RunFolder, policy: str, told: dict[str, Any]) -> int:
    """Check that every visible file is whole; damage raises. Prints the state beside `told`."""
    store, checkpoints = FolderStore(folder.weights(policy)), Checkpoints(folder.checkpoints(policy), 2)
    for version in store.versions():
        store.pull(version)
    for version in checkpoints.versions():
        checkpoints.load(version)
    assert store.head() in store.versions()
    print(json.dumps({**told, "head": store.head(), "checkpoints": checkpoints.versions()}), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.pop(PARENT_ENV, None)  # it names the parent of this process; the lives are its children
    opened = RunFolder.open(sys.argv[1])
    name = opened.recipe.policy
    load_codec()
    for moment, times in [*json.loads(sys.argv[2]), [None, 0]]:
        code = apart(partial(live, opened, name, moment, times))
        if apart(partial(look, opened, name, {"moment": moment, "code": code})):
            sys.exit(f"after {moment}: what is visible is not whole")
