"""An advisory: a problem or a possible improvement, the numbers behind it, and what to do next."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["problem", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "hint")  # the gravest first


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """`key` names the rule, `title` says what was found in one sentence with its number, `why` has the numbers behind
    it. `since` is when it began, in seconds since the epoch; None where that is unknown."""

    key: str
    severity: Severity
    title: str
    why: str
    what_to_do: str
    since: float | None = None
