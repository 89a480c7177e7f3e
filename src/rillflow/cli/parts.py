"""Commands that start one part of a run by hand, and commands for its workers: list them, change their tags, retire
nodes.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rillflow.cli.app import (
    CacheOption,
    HostOption,
    JoinOption,
    KeptOption,
    MaybeRun,
    RunArgument,
    TokenOption,
    app,
    clear_errors,
    one_run,
)
from rillflow.errors import ConfigError
from rillflow.runtime.process import prepare, run_until_signal
from rillflow.types import TokenScope


@app.command(rich_help_panel="One part of a run, started by hand")
def dataflow(
    folder: RunArgument,
    ledger: Annotated[int, typer.Option(help="Which of the run's ledgers", min=0)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let a run go on that ended without having finished")
    ] = False,
) -> None:
    """Serve the dataflow layer of a run: one ledger."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import dataflow_role

    with clear_errors(role=True):
        raise typer.Exit(dataflow_role(RunFolder.open(folder), ledger=ledger, resume=resume))


@app.command(rich_help_panel="One part of a run, started by hand")
def unit(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    name: Annotated[str | None, typer.Option(help="The unit's name", show_default="unit-0, or unit-HOST")] = None,
    ledger: Annotated[
        int, typer.Option(help="Which of the run's ledgers it keeps rows of; --join names it", min=0)
    ] = 0,
    token_file: TokenOption = None,
    cache: KeptOption = None,
    host: HostOption = "127.0.0.1",
) -> None:
    """Keep payloads for a run: one storage unit. With --join it needs nothing of the run's folder."""
    from rillflow.cli.status import to_join

    with clear_errors(role=True):
        if (opened := one_run(folder, join)) is None:
            from rillflow.runtime.joined import JoinOptions, unit_joined

            options = JoinOptions(str(join), name=name, token_file=token_file, cache=cache, host=host)
            raise typer.Exit(unit_joined(options))
        from rillflow.runtime.roles import unit_role

        raise typer.Exit(unit_role(to_join(opened), name or "unit-0", ledger=ledger))


@app.command(rich_help_panel="One part of a run, started by hand")
def engine(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    name: Annotated[
        str | None, typer.Option(help="The engine's name", show_default="engine-0, or host and pid")
    ] = None,
    token_file: TokenOption = None,
    cache: CacheOption = None,
    host: HostOption = "127.0.0.1",
) -> None:
    """Sample for the nodes of a run: one engine process. With --join it needs nothing of the run's folder."""
    from rillflow.cli.status import to_join

    with clear_errors(role=True):
        if (opened := one_run(folder, join)) is None:
            from rillflow.runtime.joined import JoinOptions, engine_joined

            options = JoinOptions(str(join), name=name, token_file=token_file, cache=cache, host=host)
            raise typer.Exit(engine_joined(options))
        from rillflow.runtime.roles import engine_role

        raise typer.Exit(engine_role(to_join(opened), name or "engine-0"))


@app.command(rich_help_panel="One part of a run, started by hand")
def rollout(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    name: Annotated[str | None, typer.Option(help="The node's name", show_default="rollout-0, or host and pid")] = None,
    token_file: TokenOption = None,
    cache: CacheOption = None,
    host: HostOption = "127.0.0.1",
    episodes: Annotated[
        int | None, typer.Option(help="With --join: episodes at once", show_default="rollout.episodes", min=1)
    ] = None,
    grace: Annotated[
        float, typer.Option(help="With --join: seconds to end episodes in, when asked to stop", min=0)
    ] = 30.0,
) -> None:
    """Play episodes for a run. With --join, from anywhere and at any time: it needs nothing of the run's folder."""
    from rillflow.cli.status import to_join

    with clear_errors(role=True):
        if (opened := one_run(folder, join)) is None:
            from rillflow.runtime.joined import JoinOptions, rollout_joined

            rollout_joined(JoinOptions(str(join), name, token_file, cache, episodes, host, grace))
        from rillflow.runtime.roles import rollout_role

        raise typer.Exit(rollout_role(to_join(opened), name or "rollout-0"))


@app.command(rich_help_panel="One part of a run, started by hand")
def stage(
    names: Annotated[list[str], typer.Argument(help="The run folder and the stage's name, or with --join its name")],
    join: JoinOption = None,
    policy: Annotated[
        str | None, typer.Option(help="The policy that has the stage", show_default="the one that has it")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The worker's name", show_default="of stage, or host and pid")
    ] = None,
    token_file: TokenOption = None,
) -> None:
    """Add columns to the samples of a run before its trainer gets them: one worker of a stage. With --join it needs
    nothing of the run's folder."""
    from rillflow.cli.status import to_join

    with clear_errors(role=True):
        if len(names) != (1 if join else 2):
            raise ConfigError("name the run and the stage", "rillflow stage RUN NAME; rillflow stage NAME --join URL")
        if join is not None:
            from rillflow.runtime.joined import JoinOptions, stage_joined

            stage_joined(JoinOptions(join, name=name, token_file=token_file), names[0], policy)
        from rillflow.runtime.roles import stage_role

        raise typer.Exit(stage_role(to_join(Path(names[0])), names[1], policy=policy, name=name))


@app.command(rich_help_panel="One part of a run, started by hand")
def weights(
    folder: RunArgument,
    host: Annotated[str | None, typer.Option(help="Where to listen", show_default="runtime.host")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="0 for any free one", show_default="runtime.weights_port, else the one it had", min=0, max=65535
        ),
    ] = None,
) -> None:
    """Serve the weights of a run over HTTP, for relays and nodes that do not see its folder.

    Where it listens is in RUN/endpoints/weights.json. Nodes pull from there with policies.*.weights.source=URL.
    """
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import weights_role

    with clear_errors(role=True):
        raise typer.Exit(weights_role(RunFolder.open(folder), host=host, port=port))


@app.command(rich_help_panel="One part of a run, started by hand")
def relay(
    upstream: Annotated[str, typer.Option(help="URL of a weight server or relay; several with commas", metavar="URL")],
    cache: Annotated[Path, typer.Option(help="Where it keeps what it has fetched", file_okay=False)],
    limit: Annotated[float, typer.Option(help="GB that the cache may take", metavar="GB")] = 100.0,
    host: Annotated[str, typer.Option(help="Where to listen")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one", min=0, max=65535)] = 0,
) -> None:
    """Pass a run's weights on in another region: fetched once, kept, served to all nodes there.

    The reader's token of the run is taken from RILLFLOW_WEIGHTS_TOKEN (`rillflow token RUN reader`). Nodes pull
    from the relay with policies.*.weights.source=URL; the URL is printed once it listens.
    """
    with clear_errors(role=True):
        raise typer.Exit(run_relay(upstream, cache, gigabytes=limit, host=host, port=port))


@app.command(rich_help_panel="One part of a run, started by hand")
def trainer(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    policy: Annotated[str | None, typer.Option(help="The policy to train", show_default="the run's first")] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Start this rank only, to join others", show_default="all, on this machine", min=0),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="How many there are", show_default="the recipe's", min=1)] = None,
    rendezvous: Annotated[str, typer.Option(help="Where ranks meet, HOST:PORT on the host of rank 0")] = "",
    playing: Annotated[
        str | None,
        typer.Option(help="Ranks that also play, such as 0,2, or none: ''", show_default="by the recipe's mode"),
    ] = None,
    token_file: TokenOption = None,
    cache: KeptOption = None,
    host: HostOption = "127.0.0.1",
) -> None:
    """Train one policy of a run. With --join it needs nothing of the run's folder, and serves its weights itself."""
    from rillflow.cli.status import to_join

    with clear_errors(role=True):
        if (named := one_run(folder, join)) is None:
            from rillflow.runtime.joined import JoinOptions, trainer_joined

            if rank is not None or ranks is not None or rendezvous or playing is not None:
                raise ConfigError("a trainer that joins by URL has one rank", "leave --rank and what goes with it out")
            options = JoinOptions(str(join), token_file=token_file, cache=cache, host=host)
            raise typer.Exit(trainer_joined(options, policy))
        from rillflow.runtime.roles import trainer_role

        opened = to_join(named)
        policy = policy or opened.recipe.policy
        code = trainer_role(opened, policy, rank=rank, ranks=ranks, rendezvous=rendezvous, playing=playing)
        raise typer.Exit(code)


@app.command(rich_help_panel="One part of a run, started by hand")
def maintain(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="RUN")
    ] = None,
    *,
    join: Annotated[str | None, typer.Option(help="Instead: the run's dataflow service", metavar="URL")] = None,
    state: Annotated[
        Path | None, typer.Option(help="With --join: where the maintainer keeps what it has started", file_okay=False)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="With --join: the operator's token", show_default="RILLFLOW_TOKEN")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done")] = False,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve report and actions to an agent over MCP, instead of acting")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="With --mcp: on this port of loopback; 0 for any", show_default="stdio", min=0, max=65535),
    ] = None,
) -> None:
    """Keep as many rollout nodes as the balance report asks for: start new ones, retire slow ones."""
    from rillflow.cli.workers import maintain as run_maintainer

    with clear_errors(role=True):
        code = run_maintainer(
            folder, join=join, state=state, token_file=token_file, dry_run=dry_run, mcp=mcp, port=port
        )
        raise typer.Exit(code)


# ---------------------------------------------------------------- the workers of a run


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
    from rillflow.cli.workers import tags_command
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
    from rillflow.cli.status import print_nodes

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
    from rillflow.cli.status import retire as retire_node

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


# ---------------------------------------------------------------- relays


TOKEN_VARIABLE = "RILLFLOW_WEIGHTS_TOKEN"
_LEAST_CACHE = 1 << 20

console = Console(stderr=True)


def run_relay(upstream: str, cache: Path, *, gigabytes: float, host: str, port: int) -> int:
    """Serve until a signal comes; returns the code that the process ends with."""
    from rillflow.weights.transport.relay import serve_relay

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"a relay needs the reader's token of the run, in {TOKEN_VARIABLE}",
            "`rillflow token RUN reader` prints it, where the run's folder is",
        )
    if not _LEAST_CACHE <= gigabytes * 1e9 < math.inf:  # also refuses NaN
        raise ConfigError(f"a cache cannot have {gigabytes} GB", "give --limit at least the size of a version")
    prepare()

    def ready(url: str) -> None:
        console.print(f"relay of {upstream} at {url}, cache in {cache}", highlight=False, soft_wrap=True)

    urls = [url.strip() for url in upstream.split(",")]
    return run_until_signal(
        serve_relay(urls, cache, token, on_ready=ready, limit=int(gigabytes * 1e9), host=host, port=port)
    )
