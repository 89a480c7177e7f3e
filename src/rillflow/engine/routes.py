"""The routes of an engine process."""

from __future__ import annotations

from rillflow.engine.frames import Frame, Generate, Hold, Release
from rillflow.types import EngineInfo
from rillflow.types.route import BYTES, MSGPACK, get, post, raw


class EngineRoutes:
    """Called by the gateways of a run (`engine.remote`)."""

    generate = raw(
        "POST", "/generate", "node", summary="Sample an answer, as a stream of frames", body=Generate, content=MSGPACK,
        again="an answer that nobody reads is aborted", waits=True, answers={BYTES: (Frame,)},
    )  # fmt: skip
    pause = post(
        "/pause",
        Hold,
        EngineInfo,
        "node",
        summary="Hold the engine for a reason",
        again="a hold is known by its reason",
    )
    resume = post(
        "/resume", Release, EngineInfo, "node", summary="Take back a reason to hold the engine",
        again="a hold is known by its reason",
    )  # fmt: skip
    status = get("/status", EngineInfo, "reader", summary="What the engine serves, and how loaded it is")
