"""The routes that every service has."""

from __future__ import annotations

from rillflow.types.route import JSON, TEXT, get, raw

DESCRIPTION = "/openapi.json"


class Common:
    """Routes that only read, open to readers."""

    health = get("/health", dict[str, str], "reader", summary="Whether the service is there")
    metrics = raw("GET", "/metrics", "reader", summary="Prometheus metrics", answers={TEXT: ()})
    description = raw("GET", DESCRIPTION, "reader", summary="This description", answers={JSON: ()})
