"""Running code that nobody has read: programs, and candidates against tests. `docs/sandbox.md` has the promises."""

from rillflow.agents.sandbox.config import SandboxConfig
from rillflow.agents.sandbox.results import Result, Status, Verdict
from rillflow.agents.sandbox.sandbox import Sandbox, close_shared, shared
from rillflow.agents.sandbox.tests import Asserts, Case, Cases, Check, Pairs, Tests, code_of, literal_cases

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
