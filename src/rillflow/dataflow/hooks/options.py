"""How a hook says which options it takes: in the types of its constructor's keyword arguments, checked on every call.

A number may be written as text, because YAML takes `1e-4` for one; numbers that are not finite are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated

from pydantic import ConfigDict, Field, validate_call

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0)]

options = validate_call(config=ConfigDict(allow_inf_nan=False))


def nearest(name: str, valid: Iterable[str]) -> str:
    """What was probably meant, as the beginning of a hint; nothing where no name is close."""
    close = difflib.get_close_matches(name, list(valid), 1)
    return f"did you mean {close[0]!r}? " if close else ""
