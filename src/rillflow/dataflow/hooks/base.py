"""What hooks are made of: options that are checked by their types, and state of many small values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, validate_call

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0)]

# For a hook's constructor: its keyword arguments are the hook's options. A number may be written as text, because YAML
# takes `1e-4` for text; numbers that are not finite are refused.
options = validate_call(config=ConfigDict(allow_inf_nan=False))


class KeyedState:
    """Base of hooks that learn something of every prompt. Only values that changed since the last save are written.

    Values are JSON and never changed in place: `put` a new one instead. None stands for the default, which the hook
    assumes of a prompt that it knows nothing of; it is saved as `null`, and such a row may be deleted.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed: dict[str, None] = {}  # in the order of change, so that what is saved does not depend on hashes

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def put(self, key: str, value: Any) -> None:
        if self._values.get(key) == value:
            return
        self._changed[key] = None
        if value is None:
            del self._values[key]
        else:
            self._values[key] = value

    def state(self) -> dict[str, Any]:
        return dict(self._values)

    def restore(self, state: dict[str, Any]) -> None:
        self._values = dict(state)
        self._changed = {}

    def changes(self) -> dict[str, Any]:
        """What `state` has of the keys that changed since the last call; None where a key is gone from it."""
        changed, self._changed = self._changed, {}
        return {key: self._values.get(key) for key in changed}


def of_prompt(prompt_id: str) -> str:
    """The key of a prompt's value, unlike the key of any value that the hook keeps of all prompts together."""
    return f"@{prompt_id}"
