"""The bounds on what an agent may ask for. Each is checked before the work that it bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    body: int = 8 << 20  # bytes of one request
    messages: int = 2048  # of one request
    tools: int = 128  # of one request
    choices: int = 64  # `n` of one request
    stops: int = 16  # stop strings of one request
    sessions: int = 4096  # open at once
    calls: int = 16384  # of one session, over its life
    concurrent: int = 64  # calls of one session at work at once
