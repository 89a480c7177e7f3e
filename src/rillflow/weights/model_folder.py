"""A policy's model folder, and what `rillflow fit` writes beside a reward model: how it was trained, and how good it
was on held-out rows.

This needs no torch, so a run can refuse a model before it starts anything. `models` loads them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from rillflow.errors import ConfigError
from rillflow.types.base import json_decoder

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


# ---------------------------------------------------------------- reward models


FILE = "rillflow.json"
CHANCE = 0.5
StepLossName = Literal["bce", "mse"]


class Quality(msgspec.Struct, frozen=True):
    """How good a process reward model was on held-out rows.

    `ranking`: how often it prefers the better of two steps at the same state, the mean over `states` that have steps
    with different labels; `error`: half of the ranking's 95 % interval; `calibration`: mean distance of scores from
    labels over ten bins of scores.
    """

    ranking: float
    error: float
    states: int
    calibration: float

    @property
    def above_chance(self) -> bool:
        return self.states > 0 and self.ranking - self.error > CHANCE


class RewardFacts(msgspec.Struct, frozen=True):
    """How a reward model was trained, as far as its user must know; the defaults are for others' models. `quality` is
    None where it was not measured."""

    task: Literal["reward", "process_reward"] = "reward"
    loss: StepLossName = "bce"
    separator: str = "\n"
    quality: Quality | None = None


def facts_of(model: str) -> RewardFacts:
    """Return what `rillflow fit` wrote beside a reward model; the defaults for others' models."""
    path = model_folder(model) / FILE
    if not path.is_file():
        return RewardFacts()
    try:
        return json_decoder(RewardFacts).decode(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not what `rillflow fit` writes: {error}", "export the model again") from error


def process_facts_of(model: str) -> RewardFacts:
    """Return the facts of a process reward model; ConfigError where `model` is not one."""
    folder = str(Path(model).expanduser())
    facts = facts_of(folder)
    if facts.task != "process_reward":
        raise ConfigError(
            f"{folder} is not a process reward model", "give the `model` folder of a fit with task process_reward"
        )
    return facts


def require_ranking(model: str) -> None:
    """Refuse a process reward model that does not rank steps of the same state above chance."""
    quality = process_facts_of(model).quality
    if quality is None or not quality.states:
        raise ConfigError(
            f"the process reward model {model} was never measured: no held-out state has steps with different labels",
            "fit it with data.heldout, on labels of several decisions at each state (process_reward.continuations)",
        )
    if not quality.above_chance:
        raise ConfigError(
            f"the process reward model {model} does not rank steps above chance: it prefers the better one in "
            f"{quality.ranking:.2f} ± {quality.error:.2f} of {quality.states} held-out states",
            "label more episodes, with more continuations, or start the fit from a better model",
        )
