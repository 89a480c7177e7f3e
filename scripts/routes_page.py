"""Write docs/routes.md from the routes' declarations: `python scripts/routes_page.py > docs/routes.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rillflow.dashboard.server import DashboardRoutes
from rillflow.engine.remote import EngineRoutes
from rillflow.gateway.control import ControlRoutes
from rillflow.gateway.dialects import AgentRoutes
from rillflow.gateway.rollout_manager import EngineControlRoutes
from rillflow.types.routes import Dataflow, Route, StorageUnits, Updates, routes_of
from rillflow.weights.transport.serve import WeightRoutes
from rillflow.wire.routing import Common

TABLES: dict[str, tuple[type, ...]] = {
    "Every service": (Common,),
    "The dataflow service": (Dataflow, Updates),
    "A storage unit": (StorageUnits,),
    "An engine": (EngineRoutes,),
    "The weight server and its relays": (WeightRoutes,),
    "The gateway": (AgentRoutes, ControlRoutes, EngineControlRoutes),
    "The dashboard": (DashboardRoutes,),
}

_HEAD = """# Routes

Every route of every process of a run. This page is made from their declarations (`python scripts/routes_page.py`), as
are the servers, the typed clients and `GET /openapi.json`, which every service answers with the types of its bodies.

A token of one of the scopes opens a route ([tokens](tokens.md)); the operator's opens all. A route that *waits*
is a long poll or a stream: it ends when its client disconnects. The last column says why a call may be sent twice, as a
client does that got no answer: the receiver takes each *attempt id* once, or a second copy does no harm.

To add a route, declare it in its table (`types/routes.py` says where tables live), bind it to a handler with
`service.on`, and give the client a method, `name = Sends(Table.name)`. Tests then ask it for its token, its scopes, its
attempt id and its disconnect, and this page is made again.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join([_HEAD, *(line for title, tables in TABLES.items() for line in _section(title, tables))])


def _section(title: str, tables: tuple[type, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    for table in tables:
        yield f"{table.__doc__}\n"
        if table is AgentRoutes:
            yield "Each exists below `/s/{session}` too.\n"
        yield "| route | scopes | does | body | answer | sent twice |"
        yield "|---|---|---|---|---|---|"
        for route in routes_of(table):
            yield _row(route)
        yield ""


def _row(route: Route[Any, Any]) -> str:
    body = f"`{_name(route.body)}`" if route.has_body else ""
    cells = [
        f"`{route.method} {route.path}`",
        ", ".join(route.scopes),
        route.summary + (" (waits)" if route.waits else ""),
        body,
        _answer(route),
        route.again or ("attempt id" if route.has_body else "reads"),
    ]
    return f"| {' | '.join(cells)} |"


def _answer(route: Route[Any, Any]) -> str:
    named = [f"`{_name(kind)}`" for kinds in route.answers.values() for kind in kinds]
    return ", ".join(named) or ", ".join(route.answers)


def _name(kind: Any) -> str:
    return str(kind) if hasattr(kind, "__args__") else kind.__name__


if __name__ == "__main__":
    sys.stdout.write(page())
