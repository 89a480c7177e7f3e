"""Commands for the workers of a run: list them, change their tags, retire nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rillflow.cli.app import JoinOption, MaybeRun, RunArgument, TokenOption, app, clear_errors
from rillflow.errors import ConfigError
from rillflow.types import TokenScope


@app.command(context_settings={"ignore_unknown_options": True})
def tags(
    folder: RunArgument,
    worker: Annotated[str | None, typer.Argument(help="Only this worker", show_default="all of them")] = None,
    change: Annotated[
        list[str] | None,
        typer.Argument(help="Its tags from now on (rollout,train or none), or changes of them (+train -rollout)"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's compute and memory bandwidth for the priorities")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the workers as JSON")] = False,
) -> None:
    """Show the tags of a run's workers, or change them while the run goes on."""
    from rillflow.cli.tags import tags_command
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        tags_command(RunFolder.open(folder), worker, change or (), measure=measure, as_json=as_json)


@app.command()
def nodes(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    token_file: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the nodes as JSON")] = False,
) -> None:
    """List the rollout nodes of a run with their state, their tasks and their throughput."""
    from rillflow.cli.join import print_nodes

    with clear_errors():
        print_nodes(folder, join, token_file, as_json=as_json)


@app.command()
def token(
    folder: RunArgument,
    scope: Annotated[TokenScope, typer.Argument(help="Who it is for", show_default=True)] = "node",
) -> None:
    """Print a token of a run, to hand to processes elsewhere.

    [b]node[/b]: rollout nodes, engines and agents that join; [b]reader[/b]: dashboards and relays, which only read;
    [b]trainer[/b]: leases batches and commits steps; [b]stage[/b]: adds columns to samples; [b]unit[/b]: keeps
    payloads; [b]operator[/b]: everything, such as retiring a node or stopping the run.
    """
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print(RunFolder.open(folder).token_of(scope))


@app.command()
def retire(
    names: Annotated[list[str], typer.Argument(help="The run folder and the node's name, or with --join its name")],
    join: JoinOption = None,
    token_file: TokenOption = None,
    drain: Annotated[float, typer.Option(help="Seconds that it has to end its episodes; 0: none", min=0)] = 120.0,
) -> None:
    """Retire a rollout node: it gets no more tasks, finishes its episodes, hands the rest back and exits."""
    from rillflow.cli.join import retire as retire_node

    with clear_errors():
        if len(names) != (1 if join else 2):
            raise ConfigError("name the run and the node", "rillflow retire RUN NODE; rillflow retire NODE --join URL")
        retire_node(None if join else Path(names[0]), join, token_file, names[-1], drain)


@app.command()
def timeline(
    folder: RunArgument,
    png: Annotated[Path | None, typer.Option(help="Draw it into this file", dir_okay=False, metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the shares as JSON")] = False,
) -> None:
    """Show how each worker of a run spent its time: rollout, inference, training, switching, loading, idle."""
    from rillflow.cli.reports import show_timeline
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        show_timeline(RunFolder.open(folder), png, as_json=as_json)
