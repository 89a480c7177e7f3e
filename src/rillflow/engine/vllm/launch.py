"""How vLLM is started: its command line and its environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rillflow.config.policy import EngineConfig
from rillflow.engine.servers.facts import ModelFacts
from rillflow.engine.servers.running import DTYPE_NAMES, WEIGHTS_INSIDE, has_tokenizer, on_loopback, visible_gpus
from rillflow.engine.vllm.inside.rillflow_channel import SHUT, TOKEN
from rillflow.errors import ConfigError
from rillflow.weights.models import pick_device

_INSIDE = Path(__file__).resolve().parent / "inside"
# Tokens of an answer between two of its parts: fewer parts cost vLLM's API server less.
_STREAM_INTERVAL = 16
# A step of a seeded server has fewer tokens than this: from here on vLLM's RMS norm adds up in another order, also with
# its batch invariance (vllm-project/vllm#48271; mended after 0.25).
_INVARIANT_BELOW = 256
# What batch invariance needs besides: attention that reads keys from the first to the last however a prompt is cut, no
# prefix cache (a cached prompt is not read as a new one is), and no kernels that a compiler has chosen by timing them,
# which differ from one start to the next.
_SEEDED = ("--attention-backend", "TRITON_ATTN", "--no-enable-prefix-caching", "--enforce-eager")


def command(model: ModelFacts, settings: EngineConfig, port: int) -> list[str]:
    server = settings.server
    cpu = pick_device(settings.device).type == "cpu"
    invariant = server.seeded and not cpu
    slots = min(settings.slots, _INVARIANT_BELOW - 1) if invariant else settings.slots
    return [
        server.python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model.folder)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", DTYPE_NAMES[model.dtype]),
        *("--max-model-len", str(settings.context)),
        *("--max-num-seqs", str(slots)),
        *("--tensor-parallel-size", str(server.tensor_parallel)),
        *("--gpu-memory-utilization", str(server.memory)),
        *("--seed", str(secrets.randbits(31))),  # two servers must not draw alike
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--stream-interval", str(_STREAM_INTERVAL)),
        *("--middleware", "rillflow_channel.Channel"),
        *("--worker-extension-cls", "rillflow_weights.RillflowWorker"),
        *("--structured-outputs-config", '{"backend": "guidance"}'),  # what the gateway checks grammars with
        *([] if has_tokenizer(model) else ["--skip-tokenizer-init"]),  # it is for grammars alone
        "--disable-uvicorn-access-log",
        "--disable-log-stats",  # its metrics cost as much as our part of a request
        *(["--enforce-eager"] if cpu else []),
        *([*_SEEDED, "--max-num-batched-tokens", str(_INVARIANT_BELOW - 1)] if invariant else []),
        *server.arguments,
    ]


def python_path() -> str:
    """Where vLLM finds what runs inside it."""
    return os.pathsep.join([str(_INSIDE), str(WEIGHTS_INSIDE)])


def environment(settings: EngineConfig, token: str) -> dict[str, str]:
    """Its other routes are shut, too."""
    device = pick_device(settings.device)
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("RILLFLOW_")}
    chosen |= {
        "PYTHONPATH": python_path(),
        "RILLFLOW_INSIDE": "vllm",
        TOKEN: token,
        SHUT: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if device.type == "cpu":
        chosen |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    elif settings.server.seeded:
        chosen["VLLM_BATCH_INVARIANT"] = "1"
    return chosen | visible_gpus(device, settings.server.tensor_parallel) | settings.server.environment


def running_server(settings: EngineConfig) -> tuple[str, str]:
    """URL and token of a server that runs already."""
    url = on_loopback(settings.server.url or "")
    token = settings.server.environment.get(TOKEN) or os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"engine.server.url needs the token of the server's channel, in the environment as {TOKEN}",
            "start the server with the same variable: see the page on engines",
        )
    return url, token
