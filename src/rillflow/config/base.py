"""The base of every section of a recipe, which refuses unknown keys, and the bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


class Named(Section):
    """Something by its name, with its options; in short the name alone, or a mapping of it to its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and len(value) == 1 and "name" not in value:
            ((name, options),) = value.items()
            return {"name": name, "options": options or {}}
        return value
