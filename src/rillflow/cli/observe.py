"""Commands that export a run for other programs: Perfetto, Prometheus, Grafana."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from rillflow.cli.app import RunArgument, app, clear_errors

if TYPE_CHECKING:
    from rillflow.runtime.folder import RunFolder


@app.command()
def trace(
    folder: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write", show_default="RUN/trace.json", dir_okay=False),
    ] = None,
    episode: Annotated[str | None, typer.Option(help="Print the life of one episode instead", metavar="ID")] = None,
    most: Annotated[int, typer.Option(help="Episodes that are shown, the newest", min=1)] = 20_000,
) -> None:
    """Write a run as a trace for Perfetto: workers, episodes, batches and steps, with arrows from lease to step."""
    from rillflow.cli.tracing import print_life, write_trace
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        opened = RunFolder.open(folder)
        if episode is not None:
            print_life(opened, episode)
        else:
            write_trace(opened, output or opened.root / "trace.json", most)


@app.command()
def grafana() -> None:
    """Print a Grafana board of all that services expose: save it as JSON and import it."""
    print(resources.files("rillflow").joinpath("assets", "grafana.json").read_text(), end="")


@app.command()
def prometheus(folder: RunArgument) -> None:
    """Print a scrape configuration for Prometheus: every service of a run, and the reader's token."""
    import yaml

    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print(yaml.safe_dump(scrape_config(RunFolder.open(folder)), sort_keys=False), end="")


def scrape_config(folder: RunFolder) -> dict[str, object]:
    """Return the configuration as Prometheus reads it. Services that come later are not in it."""
    names = sorted(path.stem for path in (folder.root / "endpoints").glob("*.json"))
    found = {name: folder.endpoint(name) for name in names}
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"run": folder.root.name, "service": name}}
        for name, url in found.items()
        if url is not None
    ]
    credentials = {"type": "Bearer", "credentials": folder.token_of("reader")}
    job = {"job_name": "rillflow", "scrape_interval": "5s", "authorization": credentials, "static_configs": targets}
    return {"scrape_configs": [job]}
