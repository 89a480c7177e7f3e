"""How a policy's weights travel: what its trainer publishes and how nodes pull it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rillflow.config.base import Positive, Section

Share = Annotated[float, Field(gt=0)]


class WeightsConfig(Section):
    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="full: every version whole; delta: bit-exact differences, and a whole version regularly; "
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
    probe: Literal["auto", "off"] | Share = Field(
        "auto",
        description="how far an engine's log-probs of a version's probe may be from the trainer's before it serves the "
        "version: a number, as a share of their spread; auto: by the dtypes; off: versions have no probe",
    )

    @field_validator("probe", mode="before")
    @classmethod
    def _off_is_no_bool(cls, value: Any) -> Any:
        """YAML takes `off` and `on` for truth values."""
        return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value
