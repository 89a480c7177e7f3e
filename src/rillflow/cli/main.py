"""The `rillflow` command. Errors that a user can do something about are printed without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rillflow
from rillflow.errors import CheckpointError, ConfigError, DataError, RillflowError
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
_FOR_GOOD = (ConfigError, DataError, CheckpointError, GiveUp)
RunArgument = Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="RUN")]


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
    runs: Annotated[Path, typer.Option(help="Where run folders are made")] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved recipe, run nothing")
    ] = False,
) -> None:
    """Run a recipe on this machine: starts every process, shows progress, ends with a summary and a plot."""
    from rillflow.cli.run import check, run_folder, show_recipe
    from rillflow.config import load_recipe
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        loaded = load_recipe(recipe, overrides or ())
        if dry_run:
            show_recipe(loaded)
            return
        check(loaded)
        with signals_held():
            raise typer.Exit(run_folder(RunFolder.create(loaded, runs)))


@app.command()
def resume(folder: RunArgument) -> None:
    """Go on with a run that was stopped, killed or failed, exactly where it was."""
    from rillflow.cli.run import check, has_finished, run_folder
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        opened = RunFolder.open(folder)
        if has_finished(opened):
            reason = opened.state()["reason"]
            errors.print(f"{folder} has finished ({reason}): nothing to resume", highlight=False, soft_wrap=True)
            errors.print(f"to train on, raise trainer.steps in {opened.root / 'recipe.yaml'}", soft_wrap=True)
            return
        check(opened.recipe)
        with signals_held():
            raise typer.Exit(run_folder(opened, resume=True))


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
def recipes() -> None:
    """List the shipped recipes."""
    from rillflow.config import load_recipe
    from rillflow.config import recipes as shipped

    table = Table("recipe", "what it does", "file")
    with clear_errors():
        for name, path in shipped().items():
            table.add_row(name, load_recipe(name).description, str(path))
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
def engine(folder: RunArgument, name: Annotated[str, typer.Option(help="The engine's name")] = "engine-0") -> None:
    """Sample for the nodes of a run: one engine process."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import engine_role

    with clear_errors(role=True):
        raise typer.Exit(engine_role(RunFolder.open(folder), name))


@app.command(rich_help_panel="One part of a run, started by hand")
def rollout(folder: RunArgument, name: Annotated[str, typer.Option(help="The node's name")] = "rollout-0") -> None:
    """Play episodes for a run."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import rollout_role

    with clear_errors(role=True):
        raise typer.Exit(rollout_role(RunFolder.open(folder), name))


@app.command(rich_help_panel="One part of a run, started by hand")
def trainer(
    folder: RunArgument,
    policy: Annotated[str | None, typer.Option(help="The policy to train  [default: the run's first]")] = None,
) -> None:
    """Train one policy of a run."""
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.roles import trainer_role

    with clear_errors(role=True):
        opened = RunFolder.open(folder)
        raise typer.Exit(trainer_role(opened, policy or opened.recipe.policy))
