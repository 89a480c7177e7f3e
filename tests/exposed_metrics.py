"""What services expose to Prometheus, against the table of docs/observability.md and the Grafana board."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).resolve().parents[1] / "docs" / "observability.md"
_ROW = re.compile(r"^\| `(rillflow_\w+\*?)`[^|]*\| ([^|]+) \|", re.MULTILINE)
_NAME = re.compile(r"rillflow_\w+")
# Only once something has happened, which a short healthy run does not wait for.
_LATER = {"rillflow_balance_*", "rillflow_batch_lease_age", "rillflow_user_errors"}
_SERVICES = {"dataflow": "dataflow", "unit": "unit-0", "gateway": "rollout-0", "trainer": "trainer-agent"}


def families(text: str) -> set[str]:
    """Return the families in an answer of `/metrics`; a counter's is its name without `_total`."""
    found = {family.name for family in text_string_to_metric_families(text)}
    return {name for name in found if not name.endswith("_created")}


def series(text: str) -> set[str]:
    """Return the names that a query can use."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def documented() -> dict[str, str]:
    """Return the service of each row of the table: `every`, or the name of one."""
    return {name: service.strip() for name, service in _ROW.findall(DOCS.read_text())}


def check_table(exposed: dict[str, str]) -> None:
    """Every metric of a service is in the table, and the other way round."""
    table = documented()
    assert len(table) > 30
    for service, process in _SERVICES.items():
        rows = {name for name, of in table.items() if of in (service, "every")}
        names = families(exposed[process])
        unknown = {name for name in names if not any(_matches(name, row) for row in rows)}
        assert not unknown, f"{service} exposes what the table does not have: {sorted(unknown)}"
        absent = {row for row in rows - _LATER if not any(_matches(name, row) for name in names)}
        assert not absent, f"the table has what {service} does not expose: {sorted(absent)}"


def check_board(exposed: dict[str, str]) -> None:
    """Every expression of the Grafana board names a metric that is exposed."""
    known = set().union(*map(series, exposed.values())) | _LATER
    board = json.loads(resources.files("rillflow").joinpath("assets", "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    expressions += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(expressions) > 30
    for expression in expressions:
        names = _NAME.findall(expression)
        assert names, expression
        assert not set(names) - known, f"{expression} names what no service exposes"


def _matches(name: str, row: str) -> bool:
    return name.startswith(row[:-1]) if row.endswith("*") else name == re.sub(r"_total$", "", row)
