"""Environments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rillflow.config import resolve_object
from rillflow.contracts import Environment


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """`name` is one of the shipped, or module:Class; every call of what is returned makes an environment."""
    made = resolve_object(name)
    return lambda: made(**options)
