"""What every section of a recipe is made of: a base that refuses unknown keys, and the bounded numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# Names become names of folders and processes.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=100)]


class Section(BaseModel):
    """Base of every section: unknown keys and numbers that are not finite are refused; immutable.

    A number may be written as text, because YAML takes `1e-4` for one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
