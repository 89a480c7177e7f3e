"""The picture and the tables of docs/scaling.md, made from the record of `bench.scale`.

    python -m bench.scale_page

The page's figures stand between pairs of comments, `<!-- scale: NAME -->` and `<!-- end -->`. This writes them again; a
test checks that they are those of the record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.scale_costs import RESULTS

RECORD = RESULTS / "scale-cpu-x86_64.json"
DOCS = RESULTS.parents[1] / "docs"
PAGE, PICTURE = DOCS / "scaling.md", DOCS / "images" / "scale.png"

Record = Mapping[str, Any]
Series = dict[tuple[str, str], dict[int, dict[str, Any]]]
_BLOCK = re.compile(r"(<!-- scale: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BASE = 64  # GPUs whose throughput is 100 %
_LATENCIES = ("lease", "put", "complete", "read", "commit")


# ---------------------------------------------------------------- tables


def _series(record: Record) -> Series:
    """Return the simulated points by model and variant, then by GPUs."""
    found: Series = {}
    for point in record["points"]:
        found.setdefault((point["model"], point["variant"]), {})[point["gpus"]] = point
    return found


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: int = 0) -> str:
    """Return a table in Markdown; the columns from number `right` on are aligned to the right."""
    marks = "|".join("---" if number < right else "---:" for number in range(len(headings)))
    lines = [f"| {' | '.join(cells)} |\n" for cells in (headings, *rows)]
    return "".join([lines[0], f"|{marks}|\n", *lines[1:]])


def throughput(record: Record) -> str:
    """Samples a second, and the throughput of a GPU relative to that at 64 GPUs."""
    series = _series(record)
    sizes = sorted({gpus for points in series.values() for gpus in points})
    rows = []
    for gpus in sizes:
        cells = []
        for points in series.values():
            rate = points[gpus]["samples_per_second"] if gpus in points else None
            base = points[_BASE]["samples_per_second"] / _BASE if _BASE in points else None
            share = f" ({rate / gpus / base:.0%})" if rate is not None and base else ""
            cells.append("" if rate is None else f"{_rounded(rate)}{share}")
        rows.append([f"{gpus:,}", *cells])
    return _table(["GPUs", *(f"{model}, {variant}" for model, variant in series)], rows)


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 20 else f"{rate:.1f}"


def limits(record: Record) -> str:
    """What is busiest at each size, and how busy the ledger is."""
    series = {name: points for name, points in _series(record).items() if name[1] in ("ours", "by host", "lifted")}
    shown = {name: points for name, points in series.items() if name[0] == record["points"][0]["model"]}
    sizes = sorted({gpus for points in shown.values() for gpus in points})
    headings = ["GPUs"]
    for model, variant in shown:
        headings += [f"{model}, {variant}", "ledger busy"]
    rows = []
    for gpus in sizes:
        row = [f"{gpus:,}"]
        for points in shown.values():
            point = points.get(gpus)
            row += [point["bottleneck"], f"{point['busy']['ledger']:.0%}"] if point else ["", ""]
        rows.append(row)
    return _table(headings, rows)


def kept(record: Record) -> str:
    """The share of a GPU's throughput at 64 GPUs that is left at 512."""
    rows = []
    for (model, variant), points in _series(record).items():
        if _BASE in points and 512 in points:
            low, high = (points[gpus]["samples_per_second"] / gpus for gpus in (_BASE, 512))
            full = [gpus for gpus, point in sorted(points.items()) if point["busy"]["ledger"] >= 0.99]
            rows.append([f"{model}, {variant}", f"{high / low:.0%}", f"{full[0]:,} GPUs" if full else "never"])
    return _table(["run", "kept from 64 to 512 GPUs", "ledger full from"], rows, right=1)


def costs(record: Record) -> str:
    """The measured costs: processor time of the serving process."""
    ledger, parts = record["costs"]["ledger"], record["costs"]["parts"]
    nodes = "/".join(str(size) for size in ledger["lease_call"]["sizes"])

    def each(name: str, unit: float, digits: int) -> str:
        return " / ".join(f"{cost / unit:.{digits}f}" for cost in ledger[name]["costs"])

    def milli(name: str) -> str:
        return f"{each(name, 1e-3, 2)} ms"

    def micro(name: str) -> str:
        return f"{each(name, 1e-6, 1)} µs"

    from_ledger, from_parts = "`scale_ledger`, the real service over HTTP", "`scale_parts`, over HTTP"
    rows = [
        ["ledger, lease of tasks", f"{milli('lease_call')} a call, {micro('lease_each')} a task", from_ledger],
        ["ledger, a request for tasks when none are pending", milli("nothing"), "the same"],
        ["ledger, completion", f"{milli('complete_call')} a call, {micro('complete_each')} a sample", "the same"],
        ["ledger, heartbeat", f"{milli('beat_call')} a call, {micro('beat_each')} an episode under way", "the same"],
        ["ledger, opening a batch", f"{micro('open')} a sample", "the same"],
        ["ledger, the part of a rank", f"{micro('rank')} a sample of the whole batch", "the same"],
        ["ledger, commit", f"{micro('commit')} a sample", "the same"],
        ["ledger, a trainer that waits", f"{micro('peek')} a ready group", "the same"],
        [
            "storage unit",
            f"{parts['put_call'] * 1e3:.2f} ms a put and {parts['put_byte'] * 1e9:.2f} ns a byte; "
            f"{parts['get_call'] * 1e3:.2f} ms a read and {parts['get_byte'] * 1e9:.2f} ns a byte; "
            f"disk {1e-9 / parts['disk_byte']:.1f} GB/s",
            from_parts,
        ],
        [
            "gateway",
            f"{parts['gateway_call'] * 1e3:.2f} ms a call and {parts['gateway_token'] * 1e6:.2f} µs a token, streamed",
            "`scale_parts`",
        ],
        [
            "weight server, relay",
            f"{parts['serve_call'] * 1e3:.1f} ms for a node and version, {1e-9 / parts['serve_byte']:.1f} GB/s",
            "`scale_parts`",
        ],
        [
            "delta on a GPU",
            f"encode {1e-9 / parts['encode_byte']:.0f}, apply {1e-9 / parts['apply_byte']:.0f} GB/s of model",
            "`weights_gpu-h200.json`",
        ],
    ]
    return _table(["part", f"cost with {nodes} nodes", "from"], rows, right=3)


def validation(record: Record) -> str:
    """Predicted against measured, with real services, units and clients."""
    found = {row["name"]: row for row in record["validation"]["results"]}
    rows = []
    for name in found:
        run, _, what = name.rpartition(": ")
        if what == "rate":
            cells = [f"{found[name]['ours']:.1f} / {found[name]['peer']:.1f}"]
            for latency in _LATENCIES:
                row = found[f"{run}: {latency}"]
                cells.append(f"{row['ours'] * 1e3:.1f} / {row['peer'] * 1e3:.1f}")
            rows.append([run, *cells])
    full = [
        f"- {name}: predicted {row['ours']:,.0f} completions/s, measured {row['peer']:,.0f} ({row['reason']}).\n"
        for name, row in found.items()
        if name.startswith("ledger full")
    ]
    table = _table(["run", "samples/s", "lease", "put", "completion", "read of a batch", "commit"], rows, right=1)
    return table + "\n" + "".join(full)


BLOCKS: dict[str, Callable[[Record], str]] = {
    "throughput": throughput,
    "limits": limits,
    "kept": kept,
    "costs": costs,
    "validation": validation,
}


def filled(page: str, record: Record) -> str:
    """Return the page with its figures taken from the record."""
    return _BLOCK.sub(lambda block: block[1] + BLOCKS[block[2]](record) + block[3], page)


# ---------------------------------------------------------------- the picture


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the throughput of a GPU, and how busy the ledger is, over the GPUs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for model, variant in dict.fromkeys((point["model"], point["variant"]) for point in points):
        mine = [point for point in points if (point["model"], point["variant"]) == (model, variant)]
        gpus = [point["gpus"] for point in mine]
        first = mine[0]["samples_per_second"] / gpus[0]
        share = [100 * point["samples_per_second"] / point["gpus"] / first for point in mine]
        style = {"ours": "-", "by host": "-.", "lifted": "--"}.get(variant, ":")
        label = f"{model}, {variant}"
        left.plot(gpus, share, style, marker="o", markersize=3, label=label)
        right.plot(
            gpus, [100 * point["busy"]["ledger"] for point in mine], style, marker="o", markersize=3, label=label
        )
    left.plot([64, 512], [100, 80.5], color="grey", marker="x", label="DistFlow, published (64 = 100 %)")
    left.set(title="throughput of a GPU, of that at 8", xlabel="GPUs", ylabel="%", xscale="log", ylim=(0, 120))
    right.set(title="time of the ledger's process", xlabel="GPUs", ylabel="%", xscale="log", ylim=(0, 105))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    record = json.loads(RECORD.read_text())
    PAGE.write_text(filled(PAGE.read_text(), record))
    draw(record["points"], PICTURE)


if __name__ == "__main__":
    main()
