"""`rillflow weights` and `rillflow relay`: a run's weights over HTTP, from its folder or from a cache near readers."""

from __future__ import annotations

import math
import os
from pathlib import Path

from rich.console import Console

from rillflow.errors import ConfigError
from rillflow.runtime.process import prepare, run_until_signal

TOKEN_VARIABLE = "RILLFLOW_WEIGHTS_TOKEN"
_LEAST = 1 << 20

console = Console(stderr=True)


def relay(upstream: str, cache: Path, *, gigabytes: float, host: str, port: int) -> int:
    """Serve until a signal comes; returns the code that the process ends with."""
    from rillflow.weights.transport.relay import serve_relay

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"a relay needs the reader's token of the run, in {TOKEN_VARIABLE}",
            "`rillflow token RUN reader` prints it, where the run's folder is",
        )
    if not _LEAST <= gigabytes * 1e9 < math.inf:  # also refuses NaN
        raise ConfigError(f"a cache cannot have {gigabytes} GB", "give --limit at least the size of a version")
    prepare()

    def ready(url: str) -> None:
        console.print(f"relay of {upstream} at {url}, cache in {cache}", highlight=False, soft_wrap=True)

    urls = [url.strip() for url in upstream.split(",")]
    return run_until_signal(
        serve_relay(urls, cache, token, on_ready=ready, limit=int(gigabytes * 1e9), host=host, port=port)
    )
