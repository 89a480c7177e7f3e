"""How an audit is shown."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from rillflow.dataflow.audit import AuditReport


def print_report(report: AuditReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return
    console = Console()
    table = Table("identity", "left", "right", "holds", title="Audit", title_justify="left")
    for identity in report.identities:
        table.add_row(identity.name, str(identity.left), str(identity.right), "yes" if identity.ok else "[red]NO[/]")
    console.print(table)
    for name, count in sorted(report.counts.items()):
        console.print(f"  {name}: {count}", highlight=False)
    console.print("[green]balanced[/]" if report.balanced else "[bold red]NOT balanced[/]")
