"""`rillflow label`: how good each step of a run's episodes was, as rows for `rillflow fit` (task process_reward)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from rillflow.cli.app import RunArgument, app, clear_errors
from rillflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rillflow.agents.agentflow.collect import Played
    from rillflow.agents.agentflow.options import Endpoint

_HELDOUT_EVERY = 10
console = Console(stderr=True)


@app.command(rich_help_panel="What agents use, and how good they are")
def label(
    folder: RunArgument,
    out: Annotated[Path, typer.Option(help="Where the rows go (JSON lines)", dir_okay=False)],
    *,
    heldout: Annotated[
        Path | None, typer.Option(help="Where those of every tenth prompt go instead", dir_okay=False)
    ] = None,
    by: Annotated[
        Literal["returns", "judge"],
        typer.Option(help="Mean outcomes of the run's own episodes, or a model that judges"),
    ] = "returns",
    url: Annotated[str | None, typer.Option(help="Of the judge's OpenAI-compatible server, up to and with /v1")] = None,
    model: Annotated[str | None, typer.Option(help="The judge's name there")] = None,
    key_variable: Annotated[str | None, typer.Option(help="Environment variable that holds its key")] = None,
) -> None:
    """Label every step of a run's planner for a process reward model."""
    from rillflow.agents.agentflow.collect import collect
    from rillflow.agents.agentflow.labels import split
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        judge = _judge(by, url, model, key_variable)
        run = RunFolder.open(folder)
        collected = collect(run.recipe, run.root)
        if not collected.episodes:
            raise DataError(
                f"no episode of {folder} can be read ({collected.gone} transcripts are gone)",
                "label a run soon after it, raise its dataflow.units.drop_after, or keep more (observe.trajectories)",
            )
        train, apart = split(collected.episodes, _HELDOUT_EVERY) if heldout else (collected.episodes, [])
        missing = _write(out, train, judge)
        if heldout is not None:
            missing += _write(heldout, apart, judge)
        steps = sum(len(episode.decisions) for episode in collected.episodes)
        console.print(
            f"{len(collected.episodes)} episodes, {steps - missing} labelled steps, {missing} without a label; "
            f"transcripts gone: {collected.gone}, without a decision: {collected.empty}",
            highlight=False,
            soft_wrap=True,
        )


def _judge(by: str, url: str | None, model: str | None, key_variable: str | None) -> Endpoint | None:
    from rillflow.agents.agentflow.options import Endpoint

    if by == "returns":
        return None
    if url is None or model is None:
        raise ConfigError("a judge needs --url and --model", "or take --by returns, which needs no judge")
    return Endpoint(url=url, model=model, key_variable=key_variable)


def _write(path: Path, episodes: Sequence[Played], judge: Endpoint | None) -> int:
    """How many steps have no label."""
    import asyncio

    from rillflow.agents.agentflow.judge import label_by_judge
    from rillflow.agents.agentflow.labels import label_by_returns
    from rillflow.storage import write_atomic

    rows: list[dict[str, Any]]
    rows, missing = (label_by_returns(episodes), 0) if judge is None else asyncio.run(label_by_judge(episodes, judge))
    write_atomic(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode())
    return missing
