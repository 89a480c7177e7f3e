"""What a node may run: functions by their name, and the one that stands for a (role, kind).

    @function("shorter", role="reward", kind="compute", needs=["reward_R", "length_R"], gives=["reward_R"])
    def shorter(step, data):
        return {"reward_R": data["reward_R"] - 0.01 * data["length_R"]}

A function declares the columns it reads and makes; the planner checks that they are there, the worker that they were
made. What a function gets and returns depends on its kind:

- fetch, generate: `(step, **options) -> Iterator[Databuffer]`: the parts of the batch as they come.
- infer, compute: `(step, data, **options) -> Mapping[str, array]`: the columns it makes. With scope "part" it is
  called for each part, as it comes; with scope "batch" once, with all of this rank's rows.
- train: `(step, parts, **options) -> Mapping[str, float]`: consumes the parts (lazily: they may still be coming), makes
  its updates, returns metrics.
- publish: `(step, **options) -> None`: hands the new weights on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rillflow.errors import GraphError

Role = Literal["actor", "critic", "reference", "reward"]
Kind = Literal["fetch", "generate", "infer", "compute", "train", "publish"]
Scope = Literal["part", "batch"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Function:
    """A function and what it declares. `default`: it stands for its (role, kind) where a node names no function."""

    name: str
    role: Role
    kind: Kind
    run: Callable[..., Any]
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    scope: Scope = "part"
    default: bool = False


class Registry:
    """Names are unique, and so is the default of a (role, kind)."""

    def __init__(self) -> None:
        self._by_name: dict[str, Function] = {}

    def add(self, entry: Function) -> None:
        if entry.name in self._by_name:
            raise GraphError(f"there are two functions named {entry.name!r}", "give one of them another name")
        twin = self.default(entry.role, entry.kind)
        if entry.default and twin is not None:
            raise GraphError(
                f"{entry.name} and {twin.name} both stand for ({entry.role}, {entry.kind})",
                "only one may be the default",
            )
        self._by_name[entry.name] = entry

    def named(self, name: str) -> Function | None:
        return self._by_name.get(name)

    def default(self, role: str, kind: str) -> Function | None:
        return next((f for f in self._by_name.values() if f.default and (f.role, f.kind) == (role, kind)), None)

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)


REGISTRY = Registry()
_DECLARED = "__rillflow_function__"


def function(
    name: str,
    *,
    role: Role,
    kind: Kind,
    needs: Sequence[str] = (),
    gives: Sequence[str] = (),
    scope: Scope = "part",
) -> Callable[[F], F]:
    """Declare a function of your own; a recipe names it by where it is (`file.py:function`)."""

    def mark(run: F) -> F:
        setattr(run, _DECLARED, Function(name, role, kind, run, tuple(needs), tuple(gives), scope))
        return run

    return mark


def declared(run: Callable[..., Any]) -> Function | None:
    """What `function` has noted, if it was used."""
    found: Function | None = getattr(run, _DECLARED, None)
    return found
