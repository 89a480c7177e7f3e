"""Commands for runs as a whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import rillflow
from rillflow.cli.app import AddressOption, DashboardOption, RunArgument, RuntimeOption, app, clear_errors, errors
from rillflow.errors import ConfigError, RunError
from rillflow.runtime.process import signals_held


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
    dashboard: DashboardOption = True,
    profile: Annotated[
        str | None, typer.Option(help="Steps for torch's profiler, such as 3-5; sets trainer.profile", metavar="STEPS")
    ] = None,
) -> None:
    """Run a recipe: starts every process, here or on a Ray cluster, shows progress, ends with a summary and a plot."""
    from rillflow.runtime.warm import early_server

    with clear_errors(), early_server(wanted=runtime == "local" and not dry_run) as early:
        from rillflow.cli.run import Where, check, run_folder, show_recipe
        from rillflow.config import load_recipe
        from rillflow.runtime.folder import RunFolder

        where = Where(runtime, address, early, dashboard)
        profiled = () if profile is None else (f'trainer.profile="{profile}"',)
        loaded = load_recipe(recipe, (*where.overrides, *profiled, *(overrides or ())))
        if dry_run:
            show_recipe(loaded)
            return
        check(loaded)
        with signals_held():
            raise typer.Exit(run_folder(RunFolder.create(loaded, runs), where))


@app.command()
def resume(
    folder: RunArgument,
    runtime: RuntimeOption = "local",
    address: AddressOption = None,
    dashboard: DashboardOption = True,
) -> None:
    """Go on with a run that was stopped, killed or failed, exactly where it was."""
    from rillflow.runtime.warm import early_server

    with clear_errors(), early_server(wanted=runtime == "local") as early:
        from rillflow.cli.run import Where, check, has_finished, how_to_train_on, run_folder
        from rillflow.runtime.folder import RunFolder

        where = Where(runtime, address, early, dashboard)
        opened = RunFolder.open(folder)
        if has_finished(opened):
            reason = opened.state()["reason"]
            errors.print(f"{folder} has finished ({reason}): nothing to resume", highlight=False, soft_wrap=True)
            errors.print(f"to train on, {how_to_train_on(opened)}", highlight=False, soft_wrap=True)
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
            raise ConfigError("a single rank joins an existing run", "give --resume RUN with --rank")
        if resume is not None:
            folder = RunFolder.open(resume)
            if rank is not None:
                from rillflow.trainer.parallel.launch import Place

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
    from rillflow.cli.reports import print_report
    from rillflow.dataflow.audit import audit_all
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        report = audit_all(RunFolder.open(folder).ledgers)
        print_report(report, as_json=as_json)
        raise typer.Exit(0 if report.balanced else 1)


@app.command()
def balance(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Show whether the pool of rollout nodes fits what the trainer takes."""
    from rillflow.cli.reports import print_balance
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
    """Show the nodes of a training step, in order, with the columns they read and make.

    Nothing is run. A graph that cannot work is refused here as `rillflow run` would refuse it.
    """
    from rillflow.cli.recipes import show_graph

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
    from rillflow.observe.run_view import quieten

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
def warm() -> None:
    """Keep torch imported, so that later runs on this machine start sooner; Ctrl-C ends it."""
    from rillflow.runtime.warm import available, server_environment, start

    with clear_errors():
        if not available():
            raise RunError("runs are forked on Linux only", "start runs without a warm process")
        start(server_environment(threads=0))


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one whole", show_default="a line for each")] = None,
) -> None:
    """List the shipped recipes, a line for each; or show one whole."""
    from rillflow.cli.recipes import list_recipes, show_shipped

    with clear_errors():
        if name is None:
            list_recipes()
        else:
            show_shipped(name)


@app.command()
def version() -> None:
    """Print the version of Rillflow and of what it runs on."""
    from importlib.metadata import version as installed

    print(f"rillflow {rillflow.__version__}")
    print(f"python {sys.version.split()[0]}, torch {installed('torch')}, transformers {installed('transformers')}")
