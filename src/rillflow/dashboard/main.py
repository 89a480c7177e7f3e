"""The dashboard's process: started by hand for any runs, or by a run for itself, on a socket that it hands over."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from rillflow.dashboard.server import Dashboard, serve
from rillflow.dashboard.watched import watch
from rillflow.runtime.process import prepare, run_until_signal

_NICENESS = 15  # of a dashboard beside a run: the run's own processes come first


def run_dashboard(paths: Sequence[Path], *, host: str, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve these runs until a signal; `on_ready` is given the address for the browser."""
    runs = watch(list(paths))
    dashboard = Dashboard(runs)

    async def main() -> None:
        base = await dashboard.start(host, port)
        on_ready(runs[0].folder.dashboard_url(base))
        await serve(dashboard)

    return run_until_signal(main())


def dashboard_role(path: Path, handle: int) -> int:
    """Serve one run as its child, on the listening socket with this file descriptor."""
    os.nice(_NICENESS)
    prepare()
    dashboard = Dashboard(watch([path]))

    async def main() -> None:
        await dashboard.start_on(socket.socket(fileno=handle))
        await serve(dashboard)

    return run_until_signal(main())
