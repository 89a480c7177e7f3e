"""Running untrusted code: programs, and candidates against tests. `docs/sandbox.md` says what is promised.

The names are loaded on first use, because worker processes import only `inside` from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow.agents.sandbox.interface import (
        Asserts,
        Case,
        Cases,
        Check,
        Pairs,
        Result,
        SandboxConfig,
        Status,
        Tests,
        Verdict,
        code_of,
        literal_cases,
    )
    from rillflow.agents.sandbox.sandbox import Sandbox, close_shared, shared

__all__ = [
    "Asserts",
    "Case",
    "Cases",
    "Check",
    "Pairs",
    "Result",
    "Sandbox",
    "SandboxConfig",
    "Status",
    "Tests",
    "Verdict",
    "close_shared",
    "code_of",
    "literal_cases",
    "shared",
]
_MODULES = {
    "interface": (
        "Asserts", "Case", "Cases", "Check", "Pairs", "Result", "SandboxConfig", "Status", "Tests", "Verdict",
        "code_of", "literal_cases",
    ),
    "sandbox": ("Sandbox", "close_shared", "shared"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
