"""`rillflow dashboard`: runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rillflow.cli.app import app, clear_errors


@app.command()
def dashboard(
    folders: Annotated[list[Path], typer.Argument(help="Run folders; two can be compared", metavar="RUN…")],
    *,
    host: Annotated[str, typer.Option(help="The address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one", min=0, max=65535)] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser")] = False,
    handle: Annotated[int | None, typer.Option("--handle", hidden=True)] = None,
) -> None:
    """Show runs in a browser, finished or running: curves, timeline, accounting, trajectories, logs.

    It only reads. The operator's token (`rillflow token RUN operator`) in place of the one in the printed URL also
    allows to stop a run and to retire a node.
    """
    with clear_errors(role=handle is not None):
        from rillflow.dashboard.main import dashboard_role, run_dashboard

        if handle is not None:
            raise typer.Exit(dashboard_role(folders[0], handle))

        def show(url: str) -> None:
            Console(stderr=True).print(f"dashboard: {url}\nCtrl-C ends it", highlight=False, soft_wrap=True)
            if open_browser:
                typer.launch(url)

        run_dashboard(folders, host=host, port=port, on_ready=show)
