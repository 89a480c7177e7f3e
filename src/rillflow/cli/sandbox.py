"""`rillflow sandbox`: check the isolation that sandboxed code gets on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from rillflow.cli.app import app, clear_errors


@app.command(rich_help_panel="What agents use, and how good they are")
def sandbox(
    isolation: Annotated[
        Literal["bubblewrap", "process"], typer.Option(help="Which isolation to check")
    ] = "bubblewrap",
) -> None:
    """Check the sandbox on this machine: start it, attack it, and say what holds."""
    from rillflow.agents.sandbox.selfcheck import check

    console = Console()
    with clear_errors():
        findings = check(isolation)
        table = Table("promise", "holds")
        for finding in findings:
            table.add_row(finding.promise, "yes" if finding.holds else "[red]no[/red]")
        console.print(table)
        if isolation == "process":
            console.print("isolation: process. It does not hold hostile code; run only what you would run by hand.")
        elif all(finding.holds for finding in findings):
            console.print("isolation: bubblewrap. Everything holds.")
        else:
            console.print("isolation: bubblewrap, and some checks failed: do not run untrusted code here.")
            raise typer.Exit(1)
