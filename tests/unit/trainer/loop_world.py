"""A trainer's surroundings in memory, for tests of its loop: a ledger that remembers, files that can fail, a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trainer_helpers import VOCAB, random_samples

from rillflow.config import TrainerConfig
from rillflow.errors import LeaseLost
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.checkpoint import Checkpoints, State
from rillflow.trainer.loop import TrainerLoop
from rillflow.trainer.parallel import Peers
from rillflow.trainer.stream import StepRecord
from rillflow.types import Batch, BatchReply, KeptTokens, Probe, TrainerJoined
from rillflow.weights import FolderStore
from rillflow.weights.codec import Adapter
from rillflow.weights.store import Publication


class Crash(Exception):
    """Stands for kill -9: nothing after it runs."""


class Unigram:
    """The smallest policy that can be trained: token frequencies, pushed by rewards, with AdamW and a tied weight."""

    generates = True

    def __init__(self, seed: int = 0) -> None:
        self.kept: list[KeptTokens] = []
        generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        self.model = {
            "embed": torch.randn(VOCAB, 3, generator=generator).requires_grad_(),
            "out": torch.randn(3, generator=generator).requires_grad_(),
            "scale": torch.tensor(1.0).requires_grad_(),
        }
        self.optimizer = torch.optim.AdamW(self.model.values(), lr=1e-2)

    def step(self, parts: Iterable[Rows], check: Callable[[], None], publish: Callable[[], None]) -> dict[str, float]:
        gradients = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}
        loss, seen = 0.0, 0
        for rows in parts:
            for start, length, reward in zip(rows.start_R, rows.length_R, rows.reward_R, strict=True):
                check()
                tokens = torch.from_numpy(rows.tokens_N[start : start + length].astype("i8"))
                logits = self.model["scale"] * self.model["embed"] @ self.model["out"]
                row = -float(reward) * logits.log_softmax(0)[tokens].mean()
                loss += row.item()
                for name, gradient in zip(gradients, torch.autograd.grad(row, list(self.model.values())), strict=True):
                    gradients[name] += gradient
            seen += 1
        check()
        for name, tensor in self.model.items():
            tensor.grad = gradients[name]
        self.optimizer.step()
        self.steps += 1
        publish()
        return {"loss": loss, "parts": float(seen)}

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        cast = {name: tensor.detach().to(dtype) for name, tensor in self.model.items()}
        return cast | {"head": cast["embed"]}

    def adapter(self) -> Adapter | None:
        return None

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.items()}

    def moments(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state
        return {
            f"{moment}/{name}": state[tensor][moment]
            for name, tensor in self.model.items()
            if tensor in state
            for moment in ("exp_avg", "exp_avg_sq", "step")
        }

    @torch.no_grad()
    def restore(self, masters: Any, moments: Any, steps: int) -> None:
        for name, tensor in masters.items():
            self.model[name].copy_(tensor)
        state = {
            number: {moment: moments[f"{moment}/{name}"].clone() for moment in ("exp_avg", "exp_avg_sq", "step")}
            for number, name in enumerate(self.model)
            if f"step/{name}" in moments
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.steps = steps


@dataclass
class Ledger:
    """The state of the dataflow service: batches in order, and the version that each one on the live line made."""

    batches: int
    events: list[str] = field(default_factory=list)
    live: list[tuple[int, int]] = field(default_factory=list)
    used: set[int] = field(default_factory=lambda: {0})
    refuse: set[str] = field(default_factory=set)
    parts: int = 1
    reading: list[Exception | None] = field(default_factory=list)
    checking: list[Exception | None] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    kept: list[list[KeptTokens]] = field(default_factory=list)
    restorable: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    abandoned: int = 0
    before: Callable[[str], None] = lambda event: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, event: str) -> None:
        with self.lock:
            self.before(event)
            self.events.append(event)

    def of(self, *kinds: str) -> list[str]:
        """The events of these kinds: those of others come whenever their threads get to it."""
        return [event for event in self.events if event.startswith(kinds)]

    # -------- Stream

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        self.note(f"join {checkpoint}")
        lost = [pair for pair in self.live if pair[1] > checkpoint]
        self.live = [pair for pair in self.live if pair[1] <= checkpoint]
        return TrainerJoined(
            version=checkpoint,
            highest=max(self.used),
            steps=len(self.live),
            orphaned=[version for _, version in lost],
            rolled_back=len(lost),
        )

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        if not have:
            self.note("lease")
        self.attempts.append(attempt)
        assert version == (self.live[-1][1] if self.live else 0)
        number = len(self.live)
        if number == self.batches:
            return BatchReply(batch=None, phase="finishing")
        samples, _ = random_samples(number)
        groups = 3 if self.parts == 1 else have + 1
        chosen = [sample for sample in samples if have <= int(sample.id[1]) < groups]
        batch = Batch(
            id=f"b{number}", attempt=attempt, policy="p", version=version, samples=chosen, seconds=60, groups=groups,
            complete=groups == 3,
        )  # fmt: skip
        return BatchReply(batch=batch, phase="training")

    def read(self, part: Batch) -> Rows:
        if self.reading and (error := self.reading.pop(0)):
            raise error
        samples, payload = random_samples(int(part.id[1:]))
        chosen = {sample.id for sample in part.samples}
        return make_rows(part.samples, [row for row, of in zip(payload, samples, strict=True) if of.id in chosen])

    def check(self) -> None:
        if self.checking and (error := self.checking.pop(0)):
            raise error

    def abandon(self) -> None:
        self.abandoned += 1

    def commit(self, record: StepRecord) -> None:
        batch, version = record.batch, record.version
        self.note(f"commit {batch.id} {version}")
        if batch.id in self.refuse:
            raise LeaseLost("the lease is gone")
        assert version not in self.used
        self.used.add(version)
        self.live.append((int(batch.id[1:]), version))
        self.restorable.append(record.restorable)
        self.kept.append(list(record.kept))
        self.metrics.append(record.metrics)
        self.before("committed")


class NotedStore(FolderStore):
    def __init__(self, folder: Path, ledger: Ledger, **options: Any) -> None:
        super().__init__(folder, **options)
        self._ledger = ledger

    def publish(self, tensors: Any, version: int, parent: int | None, probe: Probe | None = None) -> Publication:
        self._ledger.note(f"publish {version}")
        done = super().publish(tensors, version, parent, probe)
        self._ledger.note(f"published {version}")
        return done


class NotedCheckpoints(Checkpoints):
    def __init__(self, folder: Path, ledger: Ledger, peers: Peers | None = None) -> None:
        super().__init__(folder, 2, peers)
        self._ledger = ledger

    def begin(self, state: State, masters: Any, moments: Any) -> None:
        self._ledger.note(f"checkpoint {state.version}")
        super().begin(state, masters, moments)

    def _write(self, state: State, *rest: Any) -> None:
        self._ledger.note(f"write checkpoint {state.version}")
        super()._write(state, *rest)


def start(folder: Path, ledger: Ledger, worker: Any = None, **options: Any) -> Any:
    """One life of a trainer process, from its files to its end."""
    chosen = {name: options.pop(name) for name in ("batch_wait", "steps", "publish_delay") if name in options}
    config = TrainerConfig(**{"checkpoint_every": 2, "batch_wait": 5.0, **chosen})
    trained = worker or Unigram()
    store = NotedStore(folder / "w", ledger, deltas=options.pop("deltas", False))
    checkpoints = NotedCheckpoints(folder / "c", ledger)
    TrainerLoop(ledger, trained, store, checkpoints, config, **options).run()
    return trained


def crash_at(wanted: str, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def before(event: str) -> None:
        if event == wanted and left[0]:
            left[0] -= 1
            raise Crash(event)

    return before


def same(one: Any, other: Any) -> bool:
    mine, theirs = one.masters() | one.moments(), other.masters() | other.moments()
    return all(torch.equal(mine[name], theirs[name]) for name in mine) and one.steps == other.steps
