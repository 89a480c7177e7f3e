"""Finds a policy's model folder. Separate from `models`, which loads it, because this needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from rillflow.errors import ConfigError

_TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_folder(name: str) -> Path:
    """Return the model's folder: that of the shipped `tiny`, the given folder, or a hub name `org/name` unchanged."""
    folder = _TINY if name == "tiny" else Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json", "check policies.*.model")
        return folder
    if _HUB_NAME.fullmatch(name):
        return Path(name)
    raise ConfigError(
        f"model folder {name} does not exist",
        "policies.*.model is `tiny`, the path of a Hugging Face model folder, or a hub name `org/name`; hub models are "
        "best downloaded first (`hf download org/name --local-dir FOLDER`) and named by their folder",
    )
