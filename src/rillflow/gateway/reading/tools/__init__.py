"""Tool calls in sampled text: one class for each format in which models write them."""

from __future__ import annotations

from rillflow.gateway.reading.tools.parts import Offered, ParsedCall, Part, ToolFormat, ToolParser, offered

__all__ = ["Offered", "ParsedCall", "Part", "ToolFormat", "ToolParser", "offered"]
