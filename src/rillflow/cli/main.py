"""The `rillflow` command. Errors that a user can do something about are printed without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rillflow
from rillflow.errors import CheckpointError, ConfigError, DataError, GraphError, RillflowError
from rillflow.runtime.process import GIVE_UP, GiveUp, signals_held

app = typer.Typer(
    name="rillflow",
    help="Train agentic language models with reinforcement learning.\n\nStart with: rillflow run quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
errors = Console(stderr=True)
# Only a person can mend these.
_FOR_GOOD = (ConfigError, DataError, CheckpointError, GraphError, GiveUp)
RunArgument = Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="RUN")]
MaybeRun = Annotated[Path | None, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="[RUN]")]
JoinOption = Annotated[str | None, typer.Option(help="Instead: where the run's service listens", metavar="URL")]
TokenOption = Annotated[
    Path | None, typer.Option(help="With --join: the run's token", show_default="RILLFLOW_TOKEN", dir_okay=False)
]
CacheOption = Annotated[
    Path | None,
    typer.Option(help="With --join: keeps sessions and weights", show_default="nothing is kept", file_okay=False),
]
HostOption = Annotated[str, typer.Option(help="With --join: the address to listen on")]
RuntimeOption = Annotated[
    Literal["local", "ray"], typer.Option("--runtime", help="Where: on this machine, or on a Ray cluster")
]
AddressOption = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster, HOST:PORT", show_default="RAY_ADDRESS, else one is started here"),
]


def one_run(folder: Path | None, join: str | None) -> Path | None:
    """The run folder that was given; None where it was a URL."""
    if (folder is None) == (join is None):
        raise ConfigError("give a run folder, or --join URL", "RUN/endpoints/dataflow.json says where a run listens")
    return folder


@contextmanager
def clear_errors(*, role: bool = False) -> Iterator[None]:
    """Print what happened and what to do. A role that can never work says so to its supervisor by its exit code."""
    try:
        yield
    except RillflowError as error:
        # Not wrapped, so that paths can be copied.
        errors.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
        if error.hint:
            errors.print(Text.assemble(("what to do: ", "bold"), error.hint), soft_wrap=True)
        raise typer.Exit(GIVE_UP if role and isinstance(error, _FOR_GOOD) else 2) from None


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or the path of a YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as trainer.steps=20 seed=3")
    ] = None,
    *,
    runs: Annotated[Path, typer.Option(help="Where run folders are made")] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved recipe, run nothing")
    ] = False,
    runtime: RuntimeOption = "local",
    address: AddressOption = None,
) -> None:
    """Run a recipe: starts every process, here or on a Ray cluster, shows progress, ends with a summary and a plot."""
    from rillflow.cli.run import Where, check, run_folder, show_recipe
    from rillflow.config import load_recipe
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        where = Where(runtime, address)
        loaded = load_recipe(recipe, (*where.overrides, *(overrides or ())))
        if dry_run:
            show_recipe(loaded)
            return
        check(loaded)
        with signals_held():
            raise typer.Exit(run_folder(RunFolder.create(loaded, runs), where))


@app.command()
def resume(folder: RunArgument, runtime: RuntimeOption = "local", address: AddressOption = None) -> None:
    """Go on with a run that was stopped, killed or failed, exactly where it was."""
    from rillflow.cli.run import Where, check, has_finished, run_folder
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        where = Where(runtime, address)
        opened = RunFolder.open(folder)
        if has_finished(opened):
            reason = opened.state()["reason"]
            errors.print(f"{folder} has finished ({reason}): nothing to resume", highlight=False, soft_wrap=True)
            errors.print(f"to train on, raise trainer.steps in {opened.root / 'recipe.yaml'}", soft_wrap=True)
            return
        check(opened.recipe)
        with signals_held():
            raise typer.Exit(run_folder(opened, where, resume=True))


@app.command()
def fit(
    recipe: Annotated[
        str | None, typer.Argument(help="A shipped recipe's name, or the path of a YAML file with a `task`")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as trainer.steps=20 seed=3")
    ] = None,
    *,
    runs: Annotated[Path, typer.Option(help="Where run folders are made")] = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with this run folder, exactly where it was", metavar="RUN")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved recipe, train nothing")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="Which rank this process is; all ranks resume the same folder", min=0)
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks there are, where each is started by hand", min=1)] = 1,
    rendezvous: Annotated[str, typer.Option(help="Where ranks meet, HOST:PORT of rank 0's machine")] = "",
) -> None:
    """Train on rows that do not change: answers (SFT), a reward model or a process reward model."""
    from rillflow.cli.fit import fit_folder, fit_rank, new_folder
    from rillflow.cli.run import show_recipe
    from rillflow.config.supervised import load_fit
    from rillflow.runtime.folder import RunFolder

    with clear_errors(role=rank is not None and resume is not None):
        if (recipe is None) == (resume is None):
            raise ConfigError("give a recipe, or --resume RUN", "rillflow fit sft; rillflow fit --resume runs/sft-…")
        if rank is not None and resume is None:
            raise ConfigError("a single rank joins a run that is there", "give --resume RUN with --rank")
        if resume is not None:
            folder = RunFolder.open(resume)
            if rank is not None:
                from rillflow.trainer.parallel.address import Place

                raise typer.Exit(fit_rank(folder, Place(rank, ranks, rendezvous)))
            raise typer.Exit(fit_folder(folder))
        loaded = load_fit(str(recipe), overrides or ())
        if dry_run:
            show_recipe(loaded)
            return
        raise typer.Exit(fit_folder(new_folder(loaded, runs)))


@app.command()
def audit(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Prove from the ledger that every prompt, task, sample and batch is in exactly one state."""
    from rillflow.cli.audit import print_report
    from rillflow.dataflow.audit import audit as audit_ledger
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        report = audit_ledger(RunFolder.open(folder).ledger)
        print_report(report, as_json=as_json)
        raise typer.Exit(0 if report.balanced else 1)


@app.command()
def balance(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Show whether the pool of rollout nodes fits what the trainer takes."""
    from rillflow.cli.balance import print_balance
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print_balance(RunFolder.open(folder), as_json=as_json)


@app.command()
def graph(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or the path of a YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as trainer.algorithm=ppo")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Whose trainer", show_default="the recipe's first")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this file", dir_okay=False, metavar="FILE")] = None,
) -> None:
    """Show what a trainer does with every batch: the nodes of its step, in order, with the columns they read and make.

    Nothing is run. A graph that cannot work is refused here as `rillflow run` would refuse it.
    """
    from rillflow.cli.graph import show_graph

    with clear_errors():
        show_graph(recipe, overrides or (), policy, svg)


@app.command()
def export(
    folder: RunArgument,
    target: Annotated[Path, typer.Argument(help="The folder to make; it must not exist", metavar="OUT")],
    policy: Annotated[str | None, typer.Option(help="The policy to export", show_default="the run's first")] = None,
    which: Annotated[
        str, typer.Option("--version", help="latest, best (by held-out reward) or a version's number", metavar="V")
    ] = "latest",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only what LoRA has trained, as a peft folder, instead of all weights")
    ] = False,
) -> None:
    """Write a version of a policy as a plain Hugging Face model folder."""
    from rillflow.cli.quiet import quieten

    quieten()
    from rillflow.cli.export import Exporter
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        exporter = Exporter(RunFolder.open(folder), policy)
        choice = exporter.choose(which)
        (exporter.export_adapter if adapter else exporter.export)(choice.version, target)
        Console().print(
            f"version {choice.version} of {exporter.policy} ({choice.why}) is in {target}",
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from rillflow.config import recipes as shipped
    from rillflow.config.load import FIT, read_raw

    table = Table("recipe", "start it with", "what it does", "file")
    with clear_errors():
        for name, path in shipped().items():
            raw = read_raw(name)
            command = "fit" if FIT in raw else "run"
            table.add_row(name, f"rillflow {command} {name}", str(raw.get("description", "")), str(path))
    Console().print(table)


@app.command()
def version() -> None:
    """Print the version of Rillflow and of what it runs on."""
    from importlib.metadata import version as installed

    print(f"rillflow {rillflow.__version__}")
    print(f"python {sys.version.split()[0]}, torch {installed('torch')}, transformers {installed('transformers')}")


@app.command(rich_help_panel="One part of a run, started by hand")
def dataflow(
    folder: RunArgument,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let a run go on that ended without having finished")
    ] = False,
) -> None:
    """Serve the dataflow layer of a run."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import dataflow_role

    with clear_errors(role=True):
        raise typer.Exit(dataflow_role(RunFolder.open(folder), resume=resume))


@app.command(rich_help_panel="One part of a run, started by hand")
def unit(folder: RunArgument, name: Annotated[str, typer.Option(help="The unit's name")] = "unit-0") -> None:
    """Keep payloads for a run: one storage unit."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import unit_role

    with clear_errors(role=True):
        raise typer.Exit(unit_role(RunFolder.open(folder), name))


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
    from rillflow.runtime.folder import RunFolder

    with clear_errors(role=True):
        if one_run(folder, join) is None:
            from rillflow.runtime.joined import JoinOptions, engine_joined

            options = JoinOptions(str(join), name=name, token_file=token_file, cache=cache, host=host)
            raise typer.Exit(engine_joined(options))
        from rillflow.runtime.roles import engine_role

        raise typer.Exit(engine_role(RunFolder.open(str(folder)), name or "engine-0"))


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
    from rillflow.runtime.folder import RunFolder

    with clear_errors(role=True):
        if one_run(folder, join) is None:
            from rillflow.runtime.joined import JoinOptions, rollout_joined

            rollout_joined(JoinOptions(str(join), name, token_file, cache, episodes, host, grace))
        from rillflow.runtime.roles import rollout_role

        raise typer.Exit(rollout_role(RunFolder.open(str(folder)), name or "rollout-0"))


@app.command(rich_help_panel="One part of a run, started by hand")
def weights(
    folder: RunArgument,
    token: Annotated[
        bool,
        typer.Option("--token", help="Only print the token that opens these weights, for relays, and nothing else"),
    ] = False,
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
    from rillflow.cli.weights import print_token
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import weights_role

    with clear_errors(role=True):
        opened = RunFolder.open(folder)
        if token:
            print_token(opened)
            return
        raise typer.Exit(weights_role(opened, host=host, port=port))


@app.command(rich_help_panel="One part of a run, started by hand")
def relay(
    upstream: Annotated[str, typer.Option(help="URL of a weight server or relay; several with commas", metavar="URL")],
    cache: Annotated[Path, typer.Option(help="Where it keeps what it has fetched", file_okay=False)],
    limit: Annotated[float, typer.Option(help="GB that the cache may take", metavar="GB")] = 100.0,
    host: Annotated[str, typer.Option(help="Where to listen")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one", min=0, max=65535)] = 0,
) -> None:
    """Pass a run's weights on in another region: fetched once, kept, served to all nodes there.

    The token that opens the run's weights is taken from RILLFLOW_WEIGHTS_TOKEN (`rillflow weights RUN --token`). Nodes
    pull from the relay with policies.*.weights.source=URL; the URL is printed once it listens.
    """
    from rillflow.cli.weights import relay as run_relay

    with clear_errors(role=True):
        raise typer.Exit(run_relay(upstream, cache, gigabytes=limit, host=host, port=port))


@app.command(rich_help_panel="One part of a run, started by hand")
def trainer(  # noqa: PLR0917 typer calls it by name
    folder: RunArgument,
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
) -> None:
    """Train one policy of a run."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import trainer_role

    with clear_errors(role=True):
        opened = RunFolder.open(folder)
        policy = policy or opened.recipe.policy
        code = trainer_role(opened, policy, rank=rank, ranks=ranks, rendezvous=rendezvous, playing=playing)
        raise typer.Exit(code)


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
    """Show what the workers of a run can do and what they do, or change it while the run goes on."""
    from rillflow.cli.tags import tags_command
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        tags_command(RunFolder.open(folder), worker, change or (), measure=measure, as_json=as_json)


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
        Path | None, typer.Option(help="With --join: the run's token", show_default="RILLFLOW_TOKEN")
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
    from rillflow.cli.maintain import maintain as run_maintainer

    with clear_errors(role=True):
        code = run_maintainer(
            folder, join=join, state=state, token_file=token_file, dry_run=dry_run, mcp=mcp, port=port
        )
        raise typer.Exit(code)


@app.command()
def nodes(
    folder: MaybeRun = None,
    *,
    join: JoinOption = None,
    token_file: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the nodes as JSON")] = False,
) -> None:
    """List the rollout nodes of a run: what they do, hold and bring."""
    from rillflow.cli.join import print_nodes

    with clear_errors():
        print_nodes(folder, join, token_file, as_json=as_json)


@app.command()
def retire(
    names: Annotated[list[str], typer.Argument(help="The run folder and the node's name, or with --join its name")],
    join: JoinOption = None,
    token_file: TokenOption = None,
    drain: Annotated[float, typer.Option(help="Seconds that it has to end its episodes; 0: none", min=0)] = 120.0,
) -> None:
    """Send a rollout node away: it gets no more tasks, ends what it plays, hands the rest back and goes."""
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
    """Show what each worker of a run spent its time on: rollout, training, switching, loading, or nothing."""
    from rillflow.cli.timeline import show_timeline
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        show_timeline(RunFolder.open(folder), png, as_json=as_json)
