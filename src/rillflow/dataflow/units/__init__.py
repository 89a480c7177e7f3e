"""Storage units: where payload columns lie. One small class per kind, one service for all of them."""

from rillflow.dataflow.units.files import FileUnit

__all__ = ["FileUnit"]
