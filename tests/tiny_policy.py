"""The shipped `tiny` policy's tokenizer and renderer, loaded once for each process."""

from __future__ import annotations

from functools import cache
from typing import Any

from rillflow.gateway import Renderer
from rillflow.weights.models import load_tokenizer


@cache
def tiny_tokenizer() -> Any:
    """Return the tokenizer that all tests of this process share; a test that changes it loads its own."""
    return load_tokenizer("tiny")


@cache
def tiny_renderer() -> Renderer:
    """Return the renderer that all tests of this process share."""
    return Renderer.load("tiny")
