"""The picture of `bench.scale`: the throughput per GPU, and how busy the ledger is, over the GPUs.

python -m bench.scale_picture RESULT.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
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


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["points"], Path(sys.argv[2]))
