"""The problems that `rillflow advise` reports: for tests of runs that are healthy."""

from __future__ import annotations

import time
from pathlib import Path

from rillflow.observe.advisories import FactReader, advise
from rillflow.runtime.folder import RunFolder


def wrong_with(folder: Path) -> list[str]:
    """Return the problems and warnings of a run that has ended. Hints are not among them."""
    facts = FactReader(RunFolder.open(folder)).read(now=time.time())
    assert facts.unread == []
    return [advisory.title for advisory in advise(facts) if advisory.severity != "hint"]
