"""The routes of a dashboard: the page, its panels, and what the operator's token allows."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from rillflow.dashboard.panels import PANELS
from rillflow.types import RetireNode
from rillflow.types.route import JSON, Route, raw


class Refused(msgspec.Struct):
    """An error, as the page's scripts read it."""

    error: str
    hint: str


_ERRORS = (Refused,)


class DashboardRoutes:
    """Readers look; the operator stops and retires. `panels` are by their names in URLs."""

    page = raw("GET", "/", "reader", summary="The page", answers={"text/html": ()}, query=("token",))
    static = raw("GET", "/static/{name}", "reader", summary="A file of the page", answers={"text/plain": ()})
    session = raw(
        "GET",
        "/api/session",
        "reader",
        summary="The runs, and what the token allows",
        answers={JSON: ()},
        errors=_ERRORS,
    )
    advisories = raw(
        "GET", "/api/runs/{run}/advisories", "reader", summary="What the run's facts advise", answers={JSON: ()},
        errors=_ERRORS,
    )  # fmt: skip
    stop = raw("POST", "/api/runs/{run}/stop", "operator", summary="Stop a run", answers={JSON: ()}, errors=_ERRORS)
    retire = raw(
        "POST", "/api/runs/{run}/retire", "operator", summary="Retire a node of a run", body=RetireNode,
        again="the earlier end counts", answers={JSON: ()}, errors=_ERRORS,
    )  # fmt: skip
    panels: ClassVar[dict[str, Route[Any, Any]]] = {
        name: raw(
            "GET", f"/api/runs/{{run}}/{name}", "reader", summary=f"The panel `{name}`", answers={JSON: ()},
            errors=_ERRORS, query=panel.query.__struct_fields__,
        )
        for name, panel in PANELS.items()
    }  # fmt: skip
