"""Options and templates, as recipes give them to tools, rewards, environments and workflows.

Invariants: an unknown or wrong option is a ConfigError that names the nearest valid one. Text that a model or a prompt
wrote goes into a template unchanged and is never read as a template itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rillflow.config.base import Section
from rillflow.config.load import validated
from rillflow.errors import ConfigError

Fill = Callable[..., str]
OptionsT = TypeVar("OptionsT", bound=Section)
_FIELD = re.compile(r"\{([a-z_]+)\}")


def read_options(what: str, options: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """Return the validated options of `what`, which errors name: `tool search`, `reward math`, `options`."""
    try:
        return validated(dict(options), kind)
    except ConfigError as error:
        known = ", ".join(kind.model_fields) or "none"
        raise ConfigError(f"{what}: {error.message}", f"its options are: {known}") from None


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each `{name}` of `values` replaced; other braces stay, so a template may show JSON."""
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), template)


def filler(own: Mapping[str, str], given: Mapping[str, str]) -> Fill:
    """Return `fill(name, **values)`, which fills the template `name`: the recipe's, or else the workflow's own."""
    unknown = [name for name in given if name not in own]
    if unknown:
        raise ConfigError(f"options.prompts: there is no prompt {unknown[0]!r}", f"the prompts are: {', '.join(own)}")
    templates = {**own, **given}

    def fill(name: str, **values: str) -> str:
        return fill_template(templates[name], values)

    return fill
