"""How a policy's weights travel: what its trainer publishes and how nodes pull it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.base import Positive, Section


class WeightsConfig(Section):
    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="full: every version whole; delta: what has changed, bit for bit, and a whole one now and then; "
        "auto: deltas where engine.dtype has 16 bits (in fp32 nearly every weight changes at every step)",
    )
    snapshot_every: Positive = Field(
        20, description="versions from one whole version to the next, where deltas are written"
    )
    keep: Positive = Field(4, description="newest versions that always stay in the store")
    retain: Positive = Field(
        64, description="versions that stay for live nodes which are behind; those further behind take a whole version"
    )
    source: str | None = Field(
        None,
        description="where nodes pull from: the URL of a weight server or relay, or of any fsspec store; default: the "
        "run's own folder",
    )
    streams: Positive = Field(4, description="parts of a file that are fetched at once, over HTTP")
