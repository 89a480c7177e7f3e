"""SGLang as an engine: a server of its own, reached over its own HTTP interface."""

from rillflow.engine.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
