"""Commands that load models in their own process: nothing is fetched or printed that the user has not asked for."""

from __future__ import annotations

import os

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def quieten() -> None:
    """Silence transformers; call before it is imported. Variables that are already set win."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
