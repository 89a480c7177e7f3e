"""The nodes of a step graph, in YAML or in Python: each is a function of the registry, or of a user's, with a place.

A node is bound to its function when it is made: what it reads and makes is what the function declares. A column that
a function needs "where there is one" is declared with a question mark: `kl_N?`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from rillflow.config import NodeConfig, resolve_object
from rillflow.errors import GraphError, did_you_mean
from rillflow.trainer.graph.databuffer import FETCHED
from rillflow.trainer.graph.registry import REGISTRY, Function, Kind, Registry, Role, declared

SOURCES = ("fetch", "generate")
_ROLES, _KINDS = get_args(Role), get_args(Kind)
# What a function of each kind is given before its options.
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
    """`needs`: ids of the nodes before it, or None: those that make what it reads. `ranks`: how many ranks hold the
    data while it runs, or None: all."""

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
        """Whether it makes columns of the data that pass it."""
        return self.kind in ("infer", "compute")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that must be there."""
        return tuple(name for name in self.function.needs if not name.endswith("?"))

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that it reads where some node makes them."""
        return tuple(name[:-1] for name in self.function.needs if name.endswith("?"))

    @property
    def gives(self) -> tuple[str, ...]:
        return (*FETCHED, *self.function.gives) if self.is_source else self.function.gives


Definition = Node | NodeConfig | str | Callable[..., Any]


def make_node(definition: Definition, registry: Registry = REGISTRY) -> Node:
    """From a recipe's entry, the name or place of a function, or a function that `@function` has declared."""
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
                f"node {config.id or found.name} has the {what} {wanted}, its function {found.name} is for {own}",
                f"leave `{what}` out, or give another function",
            )
    needs = None if config.needs is None else tuple(config.needs)
    return Node(config.id or found.name, found, needs, config.options, config.ranks)


def _named(name: str, registry: Registry) -> Function:
    """A name of the registry wins over a place."""
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
            f"no function stands for {role} {kind}", f"give the node a `function`; there is one for: {', '.join(pairs)}"
        )
    return found


def _declared(run: Callable[..., Any], place: str = "") -> Function:
    found = declared(run)
    if found is None:
        name = getattr(run, "__name__", str(run))
        raise GraphError(
            f"{place or name} does not say what it reads and makes",
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
                f"{node.function.name} declares the column {column}, which says not what it is of",
                "end its name in _R (rows) or _N (tokens)",
            )
    if "length_R" in node.function.gives:
        raise GraphError(
            f"{node.function.name} makes length_R anew, by which rows are told apart", "take rows out by mask_N instead"
        )
    if not node.on_columns and not node.is_source and node.function.gives:
        raise GraphError(
            f"{node.function.name} is of kind {node.kind} and declares that it makes {', '.join(node.function.gives)}",
            "only infer and compute make columns",
        )


def _check_options(node: Node) -> None:
    """Every option is a parameter of the function, and none that it needs is missing."""
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
            listed = f"valid: {', '.join(valid)}" if valid else "it takes none"
            raise GraphError(
                f"node {node.id}: {name} has no option {option!r}", f"{did_you_mean(option, valid)}{listed}"
            )
    for each in own:
        if each.name in valid and each.default is each.empty and each.name not in node.options:
            raise GraphError(
                f"node {node.id}: {name} needs the option {each.name!r}", f"give it: options: {{{each.name}: …}}"
            )
