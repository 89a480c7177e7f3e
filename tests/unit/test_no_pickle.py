"""No pickle on any wire or in any file: not imported, not reached through torch or numpy."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = re.compile(
    r"\b(import|from)\s+(pickle|cPickle|cloudpickle|dill|shelve|joblib)\b|torch\.(save|load)\(|allow_pickle\s*=\s*True"
)


def test_no_source_uses_pickle() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("src", "bench", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert offenders == []
