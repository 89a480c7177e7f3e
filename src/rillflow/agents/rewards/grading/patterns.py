"""Whether a text has a shape. Expressions with much backtracking can take years: that is why this is graded apart."""

from __future__ import annotations

import re


def grade(pattern: str, text: str) -> float:
    """1.0 if the whole text matches, else 0.0. A dot matches the end of a line, too."""
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
