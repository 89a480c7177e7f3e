"""The routes of a weight server and of its relays."""

from __future__ import annotations

from rillflow.types.route import BYTES, JSON, raw
from rillflow.weights.sealed import MANIFEST


class WeightRoutes:
    """All are for readers: what is served was published before, and nothing changes."""

    line = raw(
        "GET", "/weights/{policy}/line", "reader", summary="A policy's line of versions; 304 while it is the known one",
        waits=True, answers={JSON: ()}, query=("known", "wait"),
    )  # fmt: skip
    manifest = raw(
        "GET", f"/weights/{{policy}}/{{version:int}}/{MANIFEST}", "reader", summary="The manifest of a version",
        answers={JSON: ()},
    )  # fmt: skip
    file = raw(
        "GET", "/weights/{policy}/{version:int}/{file}", "reader", summary="A file of a version, whole or a range",
        answers={BYTES: ()}, headers=("range", "if-range"),
    )  # fmt: skip
