"""How SGLang is started: its command line and its environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rillflow.config.policy import EngineConfig
from rillflow.engine.servers.facts import ModelFacts
from rillflow.engine.servers.running import DTYPE_NAMES, WEIGHTS_INSIDE, has_tokenizer, on_loopback, visible_gpus
from rillflow.engine.sglang.inside.rillflow_sglang import ORDERS
from rillflow.errors import ConfigError
from rillflow.weights.models import pick_device

LOADER = "rillflow_sglang.take"
KEY = "RILLFLOW_SGLANG_KEY"  # of a server that runs already, where it has one
_INSIDE = Path(__file__).resolve().parent / "inside"
# Tokens of an answer between two of its parts: fewer parts cost SGLang's server less.
_STREAM_INTERVAL = 16
# SGLang keeps places of the context for itself.
_RESERVED = 8


def command(model: ModelFacts, settings: EngineConfig, port: int, secret: Path) -> list[str]:
    """`secret` is a file of further settings, which other users of the machine shall not see."""
    server = settings.server
    return [
        server.python,
        *("-m", "sglang.launch_server"),
        *("--config", str(secret)),
        *("--model-path", str(model.folder)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", DTYPE_NAMES[model.dtype]),
        *("--context-length", str(settings.context + _RESERVED)),
        *("--max-running-requests", str(settings.slots)),
        *("--tp-size", str(server.tensor_parallel)),
        *("--mem-fraction-static", str(server.memory)),
        *("--random-seed", str(secrets.randbits(31))),  # two servers must not draw alike
        *("--stream-interval", str(_STREAM_INTERVAL)),
        *("--custom-weight-loader", LOADER),
        "--enable-custom-logit-processor",  # whoever has the key may run code in the server: nobody else has it
        *("--log-level", "warning"),
        "--incremental-streaming-output",
        *("--grammar-backend", "llguidance"),  # what the gateway checks grammars with
        *([] if has_tokenizer(model) else ["--skip-tokenizer-init"]),  # it is for grammars alone
        "--skip-server-warmup",
        *(_on_cpu(settings) if pick_device(settings.device).type == "cpu" else ()),
        *server.arguments,
    ]


def _on_cpu(settings: EngineConfig) -> list[str]:
    """Plain torch, which every CPU can run."""
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--max-total-tokens", str(settings.slots * (settings.context + _RESERVED))),
        "--disable-overlap-schedule",
    ]


def environment(settings: EngineConfig, orders: Path) -> dict[str, str]:
    device = pick_device(settings.device)
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("RILLFLOW_")}
    chosen |= {
        "PYTHONPATH": os.pathsep.join([str(_INSIDE), str(WEIGHTS_INSIDE)]),
        ORDERS: str(orders),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by what it reserves
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if device.type == "cpu":
        chosen["SGLANG_USE_CPU_ENGINE"] = "1"
    return chosen | visible_gpus(device, settings.server.tensor_parallel) | settings.server.environment


def running_server(settings: EngineConfig) -> tuple[str, str, Path]:
    """URL, key (perhaps empty) and folder of orders of a server that runs already."""
    given = os.environ | settings.server.environment
    folder = Path(given.get(ORDERS, ""))
    if not given.get(ORDERS) or not folder.is_dir():
        raise ConfigError(
            f"engine.server.url needs the folder that the server takes orders from, in the environment as {ORDERS}",
            f"start the server with the same variable and --custom-weight-loader {LOADER}: see the page on engines",
        )
    return on_loopback(settings.server.url or ""), given.get(KEY, ""), folder
