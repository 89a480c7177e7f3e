"""The names that agents may ask for as a provider's list of models, in the shape that the client's headers tell."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rillflow.gateway.dialects import speaks_anthropic
from rillflow.wire.messages import Request


def listed(request: Request, names: list[str], created: int) -> dict[str, Any]:
    data = [one(request, name, created) for name in names]
    if speaks_anthropic(request):
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": data}


def one(request: Request, name: str, created: int) -> dict[str, Any]:
    if not speaks_anthropic(request):
        return {"id": name, "object": "model", "created": created, "owned_by": "rillflow"}
    since = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}
