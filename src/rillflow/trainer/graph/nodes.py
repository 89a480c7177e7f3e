"""The nodes of a step graph and the functions that they run: the registry's, or a user's.

    @function("shorter", role="reward", kind="compute", needs=["reward_R", "length_R"], gives=["reward_R"])
    def shorter(step, data):
        return {"reward_R": data["reward_R"] - 0.01 * data["length_R"]}

A function declares the columns that it reads and makes. A question mark declares a column that it reads if a node makes
it: `kl_N?`. The planner checks that the columns exist, `with_made` that the function made what it declared. Arguments
and result depend on the function's kind:

- fetch, generate: `(step, **options) -> Iterator[Databuffer]`: the parts of the batch as they arrive.
- infer, compute: `(step, data, **options) -> Mapping[str, array]`: the columns it makes. With scope "part" it is
  called for each part as it arrives; with scope "batch" once, with all of this rank's rows.
- train: `(step, parts, **options) -> Mapping[str, float]`: consumes the parts (lazily: some may still be on their way),
  makes its updates, returns metrics.
- publish: `(step, **options) -> None`: hands the new weights on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from rillflow.config import NodeConfig, resolve_object
from rillflow.errors import GraphError, did_you_mean
from rillflow.trainer.batches import FETCHED, Databuffer

if TYPE_CHECKING:
    from rillflow.trainer.batches import Column


Role = Literal["actor", "critic", "reference", "reward"]
Kind = Literal["fetch", "generate", "infer", "compute", "train", "publish"]
Scope = Literal["part", "batch"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Function:
    """A function and its declarations. A `default` function is used for its (role, kind) by nodes that name none."""

    name: str
    role: Role
    kind: Kind
    run: Callable[..., Any]
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    scope: Scope = "part"
    default: bool = False


class Registry:
    """Functions by name. Names are unique, and so is the default of a (role, kind)."""

    def __init__(self) -> None:
        self._by_name: dict[str, Function] = {}

    def add(self, entry: Function) -> None:
        if entry.name in self._by_name:
            raise GraphError(f"two functions are named {entry.name!r}", "give one of them another name")
        twin = self.default(entry.role, entry.kind)
        if entry.default and twin is not None:
            raise GraphError(
                f"{entry.name} and {twin.name} are both the default of ({entry.role}, {entry.kind})",
                "declare only one of them as the default",
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
    """Declare a function of your own; a recipe names it by its place (`file.py:function`)."""

    def mark(run: F) -> F:
        setattr(run, _DECLARED, Function(name, role, kind, run, tuple(needs), tuple(gives), scope))
        return run

    return mark


def declared(run: Callable[..., Any]) -> Function | None:
    """Return what the decorator `function` declared, or None."""
    found: Function | None = getattr(run, _DECLARED, None)
    return found


# ---------------------------------------------------------------- nodes


SOURCES = ("fetch", "generate")
_ROLES, _KINDS = get_args(Role), get_args(Kind)
# The arguments of a function of each kind, before its options.
_TAKES = {
    "fetch": ("step",),
    "generate": ("step",),
    "infer": ("step", "data"),
    "compute": ("step", "data"),
    "train": ("step", "parts"),
    "publish": ("step",),
}


@dataclass(frozen=True)
class Node:
    """A function with its place in the graph.

    `needs` are ids of the nodes before it; None means the nodes that make the columns it reads. `ranks` is the number
    of ranks that hold the data while it runs; None means all.
    """

    id: str
    function: Function
    needs: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int | None = None

    @property
    def role(self) -> Role:
        return self.function.role

    @property
    def kind(self) -> Kind:
        return self.function.kind

    @property
    def is_source(self) -> bool:
        return self.kind in SOURCES

    @property
    def on_columns(self) -> bool:
        """Return whether it makes columns of the data that pass through it."""
        return self.kind in ("infer", "compute")

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns that it requires."""
        return tuple(name for name in self.function.needs if not name.endswith("?"))

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the columns that it reads if a node makes them."""
        return tuple(name[:-1] for name in self.function.needs if name.endswith("?"))

    @property
    def gives(self) -> tuple[str, ...]:
        return (*FETCHED, *self.function.gives) if self.is_source else self.function.gives


Definition = Node | NodeConfig | str | Callable[..., Any]


def make_node(definition: Definition, registry: Registry = REGISTRY) -> Node:
    """Make a node from a recipe's entry, the name or place of a function, or a function declared by `@function`."""
    if isinstance(definition, Node):
        node = definition
    elif isinstance(definition, NodeConfig):
        node = _configured(definition, registry)
    else:
        found = _named(definition, registry) if isinstance(definition, str) else _declared(definition)
        node = Node(found.name, found)
    _check_function(node)
    _check_options(node)
    return node


# ---------------------------------------------------------------- finding the function


def _configured(config: NodeConfig, registry: Registry) -> Node:
    if config.function is not None:
        found = _named(config.function, registry)
    else:
        found = _default(str(config.role), str(config.kind), registry)
    for what, wanted, own in (("role", config.role, found.role), ("kind", config.kind, found.kind)):
        if wanted is not None and wanted != own:
            raise GraphError(
                f"node {config.id or found.name} has the {what} {wanted}, but its function {found.name} has {own}",
                f"leave `{what}` out, or give another function",
            )
    needs = None if config.needs is None else tuple(config.needs)
    return Node(config.id or found.name, found, needs, config.options, config.ranks)


def _named(name: str, registry: Registry) -> Function:
    """Return the function of a name; a name of the registry wins over a place."""
    found = registry.named(name)
    if found is not None:
        return found
    if ":" in name:
        return _declared(resolve_object(name), name)
    raise GraphError(
        f"there is no function {name!r}",
        f"{did_you_mean(name, registry.names)}known: {', '.join(registry.names)}; or module:function, file.py:function",
    )


def _default(role: str, kind: str, registry: Registry) -> Function:
    found = registry.default(role, kind)
    if found is None:
        pairs = [
            f"{each.role} {each.kind}" for name in registry.names if (each := registry.named(name)) and each.default
        ]
        raise GraphError(
            f"{role} {kind} has no default function",
            f"give the node a `function`; defaults exist for: {', '.join(pairs)}",
        )
    return found


def _declared(run: Callable[..., Any], place: str = "") -> Function:
    found = declared(run)
    if found is None:
        name = getattr(run, "__name__", str(run))
        raise GraphError(
            f"{place or name} does not declare the columns that it reads and makes",
            f'declare it: @function("{name}", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"]), '
            "with `from rillflow.trainer.graph import function`",
        )
    return found


# ---------------------------------------------------------------- checking it


def _check_function(node: Node) -> None:
    for what, value, known in (("role", node.role, _ROLES), ("kind", node.kind, _KINDS)):
        if value not in known:
            raise GraphError(
                f"node {node.id} has the unknown {what} {value!r}",
                f"{did_you_mean(value, known)}known: {', '.join(known)}",
            )
    for column in (*node.reads, *node.optional, *node.function.gives):
        if not column.endswith(("_R", "_N")):
            raise GraphError(
                f"{node.function.name} declares the column {column}, which must end in _R (rows) or _N (tokens)",
                "rename it",
            )
    if "length_R" in node.function.gives:
        raise GraphError(
            f"{node.function.name} changes length_R, which separates rows", "leave rows out by mask_N instead"
        )
    if not node.on_columns and not node.is_source and node.function.gives:
        raise GraphError(
            f"{node.function.name} of kind {node.kind} declares that it makes {', '.join(node.function.gives)}",
            "only functions of kind infer or compute make columns",
        )


def _check_options(node: Node) -> None:
    """Check that every option is a parameter of the function and that no required one is missing."""
    parameters = list(inspect.signature(node.function.run).parameters.values())
    taken, name = _TAKES[node.kind], node.function.name
    if sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) < len(taken):
        raise GraphError(
            f"{name} takes too few arguments for a node of kind {node.kind}",
            f"begin it with ({', '.join(taken)})",
        )
    own = parameters[len(taken) :]
    valid = [each.name for each in own if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for option in node.options:
        if option not in valid and not any(each.kind is each.VAR_KEYWORD for each in own):
            listed = f"valid: {', '.join(valid)}" if valid else "it takes no options"
            raise GraphError(
                f"node {node.id}: {name} has no option {option!r}", f"{did_you_mean(option, valid)}{listed}"
            )
    for each in own:
        if each.name in valid and each.default is each.empty and each.name not in node.options:
            raise GraphError(
                f"node {node.id}: {name} needs the option {each.name!r}", f"give it: options: {{{each.name}: …}}"
            )


# ---------------------------------------------------------------- checking what it made


def with_made(node: Node, data: Databuffer, columns: Mapping[str, Column]) -> Databuffer:
    """Return the data with the columns that the node declared. A column that is replaced keeps its dtype."""
    if not isinstance(columns, Mapping) or set(columns) != set(node.gives):
        made = ", ".join(columns) if isinstance(columns, Mapping) else type(columns).__name__
        raise GraphError(
            f"node {node.id} returned {made or 'nothing'}, its function declares {', '.join(node.gives)}",
            f"return a dict with exactly the columns that {node.function.name} declares in `gives`",
        )
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        _check_numbers(node, name, array)
    typed = {name: array.astype(data[name].dtype) if name in data else array for name, array in arrays.items()}
    try:
        more = data.adding(typed)
    except GraphError as error:
        raise GraphError(f"node {node.id}: {error.message}", error.hint) from None
    if "mask_N" in arrays and more.rows.mask_N[more.rows.start_R].any():
        raise GraphError(
            f"node {node.id} trains the first token of {int(more.rows.mask_N[more.rows.start_R].sum())} rows",
            "a first token has no context: keep mask_N 0 there, as it was",
        )
    return more


def _check_numbers(node: Node, name: str, array: Column) -> None:
    if array.dtype.kind not in "biuf":
        raise GraphError(
            f"node {node.id} made {name} of {array.dtype}", f"let {node.function.name} return numbers or flags"
        )
    # NaN marks the tokens at which no rewarded answer ends.
    bad = np.isinf(array) if name == "step_reward_N" else ~np.isfinite(array)
    if bad.any():
        raise GraphError(
            f"node {node.id} made {name} with {int(bad.sum())} values that are not finite",
            f"check the divisions of {node.function.name}, and its inputs",
        )
