"""How servers run: what is put into them, and those that somebody else has started."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import torch

from rillflow.engine.servers.facts import ModelFacts
from rillflow.errors import ConfigError

WEIGHTS_INSIDE = Path(__file__).resolve().parent / "inside"  # on the PYTHONPATH of every server
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}  # as servers call them
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def has_tokenizer(model: ModelFacts) -> bool:
    """Whether the model has a tokenizer that grammars can be made of; one of a hub is taken to have."""
    return not model.folder.is_dir() or (model.folder / "tokenizer.json").exists()


def on_loopback(url: str) -> str:
    """The URL of a server on this machine. What goes to it is not encrypted, and who reaches it can change its weights:
    one elsewhere is reached through a tunnel that ends here."""
    if urlsplit(url).hostname not in _LOOPBACK:
        raise ConfigError(
            f"engine.server.url is {url}: not on this machine's loopback",
            "run the node beside the server, or open a tunnel (ssh -L 8000:127.0.0.1:8000 HOST) and name its near end",
        )
    return url.rstrip("/")


def visible_gpus(device: torch.device, count: int) -> dict[str, str]:
    """The variable by which a server sees `count` GPUs from `device` on, which counts among those that we see."""
    if device.type == "cpu":
        # Not an empty string: Ray uses that for processes that will get GPUs later, and vLLM would then use Triton.
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    if ":" not in str(device):  # without a number
        return {}
    end = device.index + count
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(end)] if seen is None else seen.split(",")
    if len(names) < end:
        raise ConfigError(
            f"{count} GPUs from {device} on are not there: CUDA_VISIBLE_DEVICES is {seen}",
            "lower engine.server.tensor_parallel, or show more GPUs",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device.index : end])}
