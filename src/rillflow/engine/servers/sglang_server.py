"""How SGLang is started (its command line and environment), and the shapes of its interface that are used, as far as
they are used (0.5.23: `srt/managers/io_struct.py`, `srt/entrypoints/http_server.py`,
`srt/managers/tokenizer_manager.py`).
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config.policy import EngineConfig
from rillflow.engine.servers.calls import is_cut, is_scored, needs_both
from rillflow.engine.servers.inside.rillflow_sglang import ORDERS
from rillflow.engine.servers.process import DTYPE_NAMES, INSIDE, has_tokenizer, on_loopback, visible_gpus
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import ConfigError, ContextOverflow
from rillflow.types import GenerateRequest
from rillflow.weights.models import pick_device

LOADER = "rillflow_sglang.take"
KEY = "RILLFLOW_SGLANG_KEY"  # of a server that runs already, where it has one
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
        "--enable-custom-logit-processor",  # a client with the key may run code in the server: only this node has it
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
        "PYTHONPATH": str(INSIDE),
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


# ------------------------------------------------------------ its interface

# SGLang wants a list of named tensors for each rank in Python's own serialisation. This is the empty one, byte for
# byte: nothing of ours is written in it, and nothing in it is ever read here.
_NO_TENSORS = base64.b64encode(b"\x80\x04].").decode()
# SGLang wants a logit processor in that serialisation, too: this is the name of a class on its path, byte for byte.
_CUTS = msgspec.json.encode({"callable": b"crillflow_sglang\nCuts\n.".hex()}).decode()

# Sent with every request: else the server's `--preferred-sampling-params` would apply.
_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
}

_SHAPES = {"json": "json_schema", "regex": "regex", "lark": "ebnf"}  # what SGLang calls the kinds of grammars


class Finish(msgspec.Struct):
    type: str
    message: str | None = None


class Meta(msgspec.Struct):
    """Log-probs are `[log-prob, token, text]`, of the tokens of this chunk; top ones are lists of these."""

    finish_reason: Finish | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Failure(msgspec.Struct):
    message: str = ""


class Chunk(msgspec.Struct):
    """One event of a stream: the tokens since the last one (`--incremental-streaming-output`)."""

    output_ids: list[int] = []
    meta_info: Meta = msgspec.field(default_factory=Meta)
    error: Failure | None = None


class Outcome(msgspec.Struct):
    """Of anything that changes weights."""

    success: bool
    message: str = ""


def generate_body(request: GenerateRequest, context: int, salt: str) -> bytes:
    """`salt` keeps the prefix cache from crossing versions. An answer that is scored becomes a prompt, which needs a
    place behind it. `top_p` and `top_k` are our own cuts (`Cuts`): SGLang tells log-probs as before its own. The place
    of a top token is for the model's own log-prob (`rillflow_logprobs`)."""
    asked = request.sampling
    room = context - len(request.tokens) - is_scored(asked)
    if room < 1:
        raise ContextOverflow("the prompt leaves no room for an answer that has to be scored", "shorten it")
    sampling: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": 1.0,
        "top_k": -1,
        **_NEUTRAL,
        "max_new_tokens": min(asked.max_tokens, room),
        "stop_token_ids": list(asked.stop_tokens),
        # It switches off all stopping by tokens: without, SGLang also stops at the model's own ends.
        "ignore_eos": not asked.stop_tokens,
    }
    if asked.grammar is not None:
        sampling[_SHAPES[asked.grammar.kind]] = asked.grammar.text
    body: dict[str, Any] = {
        "input_ids": request.tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": int(needs_both(asked)),
        "stream": True,
        "extra_key": salt,
    }
    if is_cut(asked):
        sampling["custom_params"] = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
        body["custom_logit_processor"] = _CUTS
    return msgspec.json.encode(body)


def score_body(tokens: list[int], answer: list[int], salt: str) -> dict[str, Any]:
    """For the log-probs of an answer's tokens as those of a prompt: the model's own, without a grammar."""
    return {
        "input_ids": [*tokens, *answer],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(tokens) - 1,
        "extra_key": salt,
    }


def probe_body(prompts: Sequence[Sequence[int]], salt: str) -> dict[str, Any]:
    """For the log-probs of all tokens of several prompts, in one request."""
    return {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": [salt] * len(prompts),
    }


def loader_body(loader: str, ranks: int) -> dict[str, Any]:
    return {
        "serialized_named_tensors": [_NO_TENSORS] * ranks,
        "load_format": loader,
        "flush_cache": False,
        "selector": "target",
    }
