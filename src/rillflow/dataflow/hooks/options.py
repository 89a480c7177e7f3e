"""How a hook says which options it takes: in the types of its constructor's keyword arguments, checked on every call.

A number may be written as text, because YAML takes `1e-4` for one; numbers that are not finite are refused.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, validate_call

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0)]

options = validate_call(config=ConfigDict(allow_inf_nan=False))
