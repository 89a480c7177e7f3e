"""Everything that the rules know of a run, as plain data: one `Facts` can be written as JSON and read again.

Invariants: reading never raises for what a run folder holds; what cannot be read is listed in `unread`. Numbers that
are not finite, or absurdly large, are None.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import Recipe
from rillflow.dataflow.ledger_facts import LedgerFacts, NodeFacts, read_ledger_facts
from rillflow.errors import RillflowError
from rillflow.observe.metrics import MetricsReader
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import Span, read_spans
from rillflow.types import GOOD_ENDS, NodeInfo, Status

_LOG_BYTES = 256 << 10  # of the end of each log
_LOGS = 64
LARGEST = 1e100  # beyond it, and where it is NaN, a number counts as none: sums must not overflow
_KEPT = 512  # steps of a policy: the first half and the latest
_NOT_SERVED = re.compile(
    r"policy (?P<policy>\S+): version (?P<version>\d+) not loaded, (?P<still>.*?): version \d+ is not served, "
    r"(?P<cause>numerics|stale weights|wrong weights|cut distribution): (?P<why>.*)"
)
_LOADED = re.compile(r"policy (?P<policy>\S+): version \d+, \w+, \d+ bytes: fetched")
_NO_SPACE = re.compile(r".*no space left.*", re.IGNORECASE)
_TROUBLE = re.compile(
    r"(?:node|engine) (?P<worker>\S+): policy (?P<policy>\S+): version (?P<version>\d+) not loaded: version \d+ is not "
    r"served, (?P<cause>numerics|stale weights|wrong weights|cut distribution): (?P<why>.*)"
)


class Step(msgspec.Struct, frozen=True):
    """One optimizer step. Each number has the name that it has in `metrics.jsonl`; None where it has none."""

    step: int
    time: float | None = None
    reward: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    skipped: float | None = None
    approx_kl: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    entropy: float | None = None
    response_length: float | None = None
    truncated: float | None = None
    wait_fraction: float | None = None
    zero_variance_fraction: float | None = None
    apart: float | None = msgspec.field(default=None, name="consistency/mean")

    @property
    def clipped(self) -> float | None:
        return None if self.clip_low is None or self.clip_high is None else self.clip_low + self.clip_high


class Evaluation(msgspec.Struct, frozen=True):
    step: int
    reward: float


class Refusal(msgspec.Struct, frozen=True):
    """An engine that does not reproduce the log-probs of a version and serves nothing."""

    worker: str
    policy: str
    version: int
    cause: str
    why: str


class Settings(msgspec.Struct, frozen=True):
    """What advice needs of the recipe."""

    staleness: int = 4
    max_tokens: dict[str, int] = {}
    lr: dict[str, float] = {}
    episode_timeout: float = 60.0
    filters: bool = True
    on_policy: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`started` is when the run began, or went on. It is `live` where its service answers, and `held` where a
    supervisor works on its folder; `waits` are what the service waits for. `idle` is the share of its time that each
    worker did nothing, `disk_free` of the disk that is left. `unread` says which parts could not be read."""

    now: float
    state: str = "new"
    reason: str = ""
    live: bool = False
    held: bool = False
    started: float | None = None
    settings: Settings = Settings()
    policies: dict[str, list[Step]] = {}
    heldout: list[Evaluation] = []
    ledger: LedgerFacts = LedgerFacts()
    waits: list[str] = []
    refusals: list[Refusal] = []
    no_space: str = ""
    disk_free: float | None = None
    idle: dict[str, float] = {}
    unread: list[str] = []

    @property
    def ended_well(self) -> bool:
        return self.state == "finished" and self.reason in GOOD_ENDS

    @property
    def episodes(self) -> int:
        """Episodes that have ended, well or badly."""
        return self.ledger.completed + self.ledger.failed

    @classmethod
    def of_run(
        cls, folder: RunFolder, status: Status | None = None, nodes: Sequence[NodeInfo] | None = None, now: float = 0.0
    ) -> Facts:
        """Read a run folder; `status` and `nodes` are a live service's answers, and newer than the folder."""
        reading = _Reading()
        state = reading.of(folder.state, {})
        begun = (
            _number(state.get("time")) if state.get("state") == "running" else reading.of(lambda: folder.started, None)
        )
        ledger = reading.of(lambda: read_ledger_facts(folder.ledger), None) if folder.ledger.is_file() else None
        ledger = _with_live(ledger or LedgerFacts(), status, nodes, now)
        policies, heldout = reading.of(lambda: read_steps(folder.metrics), ({}, []))
        refusals, no_space = reading.of(lambda: _read_logs(folder.root / "logs"), ([], ""))
        waits = list(status.waits) if status is not None else []
        return cls(
            now=now,
            state=str(state.get("state", "new")),
            reason=status.reason if status is not None and status.reason else str(state.get("reason", "")),
            live=status is not None and status.phase != "ended",
            held=state.get("state") == "running" and reading.of(lambda: folder.held, False),
            started=begun,
            settings=reading.of(lambda: _settings(folder), Settings()),
            policies=policies,
            heldout=heldout,
            ledger=ledger,
            waits=waits,
            refusals=[*refusals, *_refusals_of(waits, refusals)],
            no_space=no_space,
            disk_free=reading.of(lambda: _disk_free(folder.root), None),
            idle=reading.of(lambda: _idle(read_spans(folder.root)), {}),
            unread=reading.unread,
        )


class _Reading:
    """Reads one part after the other; what fails is remembered and replaced by nothing."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def of(self, read: Any, otherwise: Any) -> Any:
        try:
            return read()
        except (RillflowError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.unread.append(" ".join(str(error).split())[:300] or type(error).__name__)
            return otherwise


# ---------------------------------------------------------------- metrics.jsonl


def read_steps(path: Path) -> tuple[dict[str, list[Step]], list[Evaluation]]:
    """Return the steps of each policy and the evaluations of the live lines of weights. Other lines are passed over."""
    policies: dict[str, list[Step]] = {}
    heldout: list[Evaluation] = []
    lines: Iterator[Any] = MetricsReader(path).new()  # of a file that anybody may have written
    for line in lines:
        if not isinstance(line, dict):
            continue
        step = _whole(line.get("step"))
        match line.get("event"):
            case None if step is not None:
                policies.setdefault(str(line.get("policy", "")), []).append(_step(step, line))
            case "evaluation" if step is not None and (reward := _number(line.get("reward"))) is not None:
                heldout.append(Evaluation(step, reward))
            case "rollback" if step is not None:
                steps = policies.get(str(line.get("policy", "")), [])
                steps[:] = [one for one in steps if one.step <= step]
    return {name: _thinned(steps) for name, steps in policies.items()}, heldout


_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(Step) if field.name != "step"}


def _step(number: int, line: Mapping[str, Any]) -> Step:
    return Step(number, **{name: _number(line.get(written)) for name, written in _NAMES.items()})


def _thinned(steps: list[Step]) -> list[Step]:
    return steps if len(steps) <= _KEPT else [*steps[: _KEPT // 2], *steps[-_KEPT // 2 :]]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


# ---------------------------------------------------------------- the folder


def _settings(folder: RunFolder) -> Settings:
    from rillflow.config.load import FIT, parse

    if FIT in parse(folder.root / "recipe.yaml"):
        return Settings()
    recipe: Recipe = folder.recipe
    return Settings(
        staleness=max(recipe.staleness(name) for name in recipe.policies),
        max_tokens={name: policy.sampling.max_tokens for name, policy in recipe.policies.items()},
        lr={name: policy.trainer.lr for name, policy in recipe.policies.items()},
        episode_timeout=recipe.rollout.episode_timeout,
        filters=any(hook.name == "zero_variance" for hook in recipe.dataflow.filters),
        on_policy=recipe.mode == "colocated",
    )


def _disk_free(root: Path) -> float | None:
    usage = shutil.disk_usage(root)
    return usage.free / usage.total if usage.total else None


def _idle(workers: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for worker, spans in workers.items():
        seconds = sum(span.end - span.begin for span in spans)
        if seconds > 0:
            shares[worker] = sum(span.end - span.begin for span in spans if span.state == "idle") / seconds
    return shares


def _read_logs(folder: Path) -> tuple[list[Refusal], str]:
    """Return the engines that serve nothing, as their logs end, and the last line about a full disk."""
    refusals: list[Refusal] = []
    no_space = ""
    for path in sorted(folder.glob("*.log"))[:_LOGS]:
        refused: dict[str, Refusal] = {}
        for line in _tail(path):
            if match := _NOT_SERVED.search(line):
                refused[match["policy"]] = _refusal(path.stem, match)
            elif match := _LOADED.search(line):
                refused.pop(match["policy"], None)
            elif _NO_SPACE.match(line):
                no_space = f"{path.name}: {line.strip()[:300]}"
        refusals += refused.values()
    return refusals, no_space


def _tail(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        yield from file.read(_LOG_BYTES).decode(errors="replace").splitlines()


def _refusals_of(waits: Sequence[str], known: Sequence[Refusal]) -> Iterator[Refusal]:
    """Engines elsewhere have no log here: the service says what is wrong with them."""
    workers = {one.worker for one in known}
    for wait in waits:
        if (match := _TROUBLE.search(wait)) and match["worker"] not in workers:
            yield _refusal(match["worker"], match)


def _refusal(worker: str, match: re.Match[str]) -> Refusal:
    version = int(match["version"][:18])
    return Refusal(worker, match["policy"], version, match["cause"], match["why"].strip()[:300])


def _with_live(ledger: LedgerFacts, status: Status | None, nodes: Sequence[NodeInfo] | None, now: float) -> LedgerFacts:
    if nodes is not None:
        ledger = msgspec.structs.replace(ledger, nodes=[_live_node(one, now) for one in nodes])
    if status is not None:
        ledger = msgspec.structs.replace(
            ledger, errors=status.errors or ledger.errors, notes={**ledger.notes, **status.notes}
        )
    return ledger


def _live_node(node: NodeInfo, now: float) -> NodeFacts:
    return NodeFacts(
        name=node.name,
        state=node.state,
        seen=now - node.seen,
        completed=node.completed,
        failed=node.failed,
        pace=node.pace,
        versions=node.versions,
    )
