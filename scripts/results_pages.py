"""The pages of the documentation that are made from `bench/results`: what recipes learn, and what asynchrony costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.arms import table

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"

_RECIPES = """# What each recipe learns

Every shipped recipe with its result. The page is made from `bench/results/recipes.json` by
`python -m scripts.reference_pages`. `make recipes` runs the recipes that need nothing but a CPU, as they are shipped,
and writes their rows; `python -m bench.recipes --only NAME --seeds 3` runs one of them.

Before and after are of held-out prompts or rows. The interval is half of the 95 % interval, over seeds where there are
several and else over prompts. The evaluation before training goes on while training does, so `before` is partly of
weights that have trained already. A recipe without a number says why.
"""

_ASYNCHRONY = """# What asynchrony costs

A node that never waits for the trainer samples with older weights. `python -m bench.staleness` measures what that costs
in reward and gains in time: the stockroom from the shipped tiny policy, the same number of optimizer steps of 128
samples in every arm, the same held-out prompts and seeds. The page is made from the bench's result by
`python -m scripts.reference_pages`.

The arms:

- **on-policy**: a batch is sampled, then trained on. With ratios of 1 all losses have the same gradient, so one is run.
- **one step off**: nodes sample a batch while the one before is trained on, then wait for its weights.
- **staleness N**: samples may be N versions old when they are trained on.
- **staggered**: four engines, of which at most two change their weights at once (`rollout.staggered: true`); the other
  arms have one engine.
- **PPO**: a critic, with two samples of a prompt instead of eight.

One thing is emulated: the trainer's step sleeps for a fixed time, as if it had a device of its own. So sampling is
faster than training and samples are about as old as the bound allows; the table has the staleness that was measured.
Seconds contain that time. Sampling, gradients, losses and the transfer of weights are real.
"""

_FOUND = """
## What follows

Seeds 0 and 1 ran here, three runs at a time on two cores; seed 2 on 16 other cores, thirteen at a time. So seconds are
too high, and of different machines. Arms with half the learning rate, and with other storage, have one seed.

- **A bound of one version gives nearly all of the time and costs little**: a run takes 117 instead of 151 s and
  reaches 0.9 after as many samples as on-policy. Higher bounds gain no more time here, and need more samples to 0.9.
- **GRPO stays at 0.89 to 0.94** up to a staleness of 4, and at 0.76 with 8. Decoupled PPO, TIS and M2PO learn the
  first 0.8 as fast with staleness 2 and above, and most of their runs fall apart later.
- **What they do not bear is the size of the steps.** With half the learning rate all four losses end at 0.86 to 0.93 at
  staleness 4 (one seed), and with smaller steps on an H200 (below) none falls apart. GRPO clips each token against the
  policy that sampled it, which bounds its steps; decoupled PPO's ratio is to the policy before the update, and with
  one update of a batch it is 1, so nothing is clipped.
  Ratios up to 45 and 109 were seen in two of the runs that fell apart.
- The default of `dataflow.staleness` is 2: with 1, groups whose longest answer takes longer than a step are
  dropped ([performance](performance.md#against-trl)). Take 1 where episodes are short, and 4 for long tails. The
  default loss is GRPO's. **With a learning rate that on-policy training bears easily, TIS needs fewer stale samples**
  (below).
- Four storage units instead of one change neither reward (0.95 against 0.96, the same seed) nor time: a unit is not
  what these runs wait for. Redis as storage was not measured.
- PPO with a critic loses more than GRPO: 0.98, 0.87 and 0.42 at 0, 2 and 8.

## Losses and staleness on one H200

`python -m bench.async_gpu --lr 2e-5 --steps 60` with one vLLM server, SmolLM2-135M, one-digit addition, one seed, five
runs at a time (so seconds say nothing). Steps of 256 samples until the mean reward of five steps reaches a level:

| arm | staleness: mean, most | 0.8 | 0.9 | 0.95 | reward, last 10 steps | largest ratio |
|---|---|---|---|---|---|---|
| on-policy | 0.0, 0 | 13 | 16 | 18 | 0.999 | 1.7 |
| staleness 1, GRPO | 0.9, 1 | 13 | 17 | 20 | 0.998 | 5.2 |
| staleness 1, decoupled PPO | 0.9, 1 | 15 | 18 | 19 | 0.999 | 3.3 |
| staleness 1, TIS | 0.9, 1 | 13 | 15 | 19 | 0.997 | 5.2 |
| staleness 1, M2PO | 0.9, 1 | 15 | 18 | 21 | 0.999 | 3.1 |
| staleness 4, GRPO | 2.2, 4 | 19 | 23 | 26 | 0.988 | 4.4 |
| staleness 4, decoupled PPO | 2.0, 4 | 16 | 19 | 21 | 0.997 | 10.2 |
| staleness 4, TIS | 2.1, 4 | 15 | 17 | 19 | 0.999 | 15.0 |
| staleness 4, M2PO | 2.3, 4 | 19 | 22 | 24 | 0.998 | 16.9 |
| staleness 8, GRPO | 2.3, 6 | 21 | 24 | 27 | 0.998 | 3.6 |
| staleness 8, decoupled PPO | 2.2, 6 | 17 | 20 | 22 | 0.999 | 12.0 |
| staleness 8, TIS | 2.3, 6 | 16 | 19 | 20 | 0.998 | 13.6 |
| staleness 8, M2PO | 2.5, 7 | 19 | 23 | 26 | 0.999 | 7.3 |

## Staggered updates on one H200

`python -m bench.async_gpu` with three vLLM servers, SmolLM2-135M, one-digit addition, learning rate 2e-5, staleness 2,
one run of each:

| | samples/s | seconds to a mean reward of 0.9 | seconds of an update, of them without a token |
|---|---|---|---|
| engines take turns (`rollout.staggered: true`) | 658 | 9.6 | 0.27, 0.04 |
| each engine when it is ready (`false`) | 762 | 7.8 | 0.22, 0.04 |
| TRL, vLLM in its process | 628 | 9.9 | |

An update stops an engine for 0.04 s, so turns have little to spread, and they delay the weights of those that wait. So
`rollout.staggered` is off by default. The other 0.18 s of an update are before the stop. They are the decoding of the
delta beside sampling (`ready` in an engine's log): with `engine.on_update: keep`, which cuts no answer and waits for
none, they are the same, and so are the samples a second (658 with `keep`, 659 without, on a slower day on which TRL
made 417). A likely reason, not proven, is Python's lock: the decoding thread and vLLM's own need it for each operator,
and a delta of this model takes 1,341 of them.
"""


def recipe_results() -> str:
    """Return the page of recipes and their results."""
    rows: dict[str, dict[str, Any]] = json.loads((RESULTS / "recipes.json").read_text())["recipes"]
    run = {name: row for name, row in rows.items() if row["after"] is not None}
    without = {name: row for name, row in rows.items() if name not in run}
    head = ["recipe", "measure", "before", "after", "seeds", "samples", "seconds", "machine", "command", "remark"]
    parts = [_RECIPES, table(head, [_recipe(name, row) for name, row in run.items()])]
    parts += [
        "\n## Without a result\n",
        table(["recipe", "why"], [[f"`{n}`", r["reason"]] for n, r in without.items()]),
    ]
    return "\n".join(parts) + "\n"


def _recipe(name: str, row: dict[str, Any]) -> list[str]:
    interval = "" if row["interval"] is None else f" ± {row['interval']:.3f}"
    start = f"from `{row['start']}`" if row["start"] else ""
    remark = "; ".join(part for part in (start, row["reason"]) if part)
    counts = ["-" if row[key] is None else f"{row[key]:,.0f}" for key in ("seeds", "samples", "seconds")]
    before = "-" if row["before"] is None else f"{row['before']:.3f}"
    return [f"`{name}`", row["measure"], before, f"**{row['after']:.3f}**{interval}", *counts, row["machine"],
            f"`{row['command']}`", remark]  # fmt: skip


def asynchrony() -> str:
    """Return the page of staleness, with the table of the newest result if there is one."""
    from bench.staleness import HEAD, row

    files = sorted(RESULTS.glob("staleness-*.json"))
    if not files:
        return f"{_ASYNCHRONY}\nThe bench has not been run in full yet: there is no table.\n"
    parts = [_ASYNCHRONY]
    for file in files:
        found = json.loads(file.read_text())
        on = found["machine"]
        rows = [row(name, arm) for name, arm in found["arms"].items()]
        parts.append(
            f"\n## {on['cpu']}, {on['cores']} cores\n\n"
            f"`{found['command']}`, a step sleeps {found['pace_seconds']:g} s. "
            f"Seconds and samples to a reward are of the mean training reward of five steps. "
            f"Intervals are over seeds.\n\n{table(HEAD, rows)}\n"
        )
        if (picture := RESULTS.parents[1] / "docs" / "images" / f"{file.stem}.png").is_file():
            parts.append(f"\n![training reward against samples and seconds](images/{picture.name})\n")
    return "".join([*parts, _FOUND])
