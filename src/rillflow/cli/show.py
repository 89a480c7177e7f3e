"""`rillflow show`: the kept episodes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from rillflow.cli.app import RunArgument, app, clear_errors
from rillflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rillflow.storage.trajectories import Trajectories

Names = list[str] | None


@app.command()
def show(
    folder: RunArgument,
    name: Annotated[
        str | None, typer.Argument(help="One of those that the table lists; without it, the table", metavar="[EPISODE]")
    ] = None,
    *,
    step: Annotated[str | None, typer.Option(help="An optimizer step, or FIRST:LAST", metavar="N")] = None,
    policy: Annotated[Names, typer.Option(help="Of this policy; may be given several times")] = None,
    role: Annotated[Names, typer.Option(help="With this agent")] = None,
    reward: Annotated[str | None, typer.Option(help="LOW:HIGH; either may be left out", metavar="LOW:HIGH")] = None,
    version: Annotated[str | None, typer.Option(help="Sampled by this version, or FIRST:LAST", metavar="N")] = None,
    status: Annotated[Literal["done", "failed"] | None, typer.Option(help="How it ended")] = None,
    lane: Annotated[Literal["train", "evaluation"] | None, typer.Option(help="What it was played for")] = None,
    kept: Annotated[Names, typer.Option(help="sample, best, worst, failure or evaluation")] = None,
    prompt: Annotated[Names, typer.Option(help="Of the prompt with this id")] = None,
    order: Annotated[str, typer.Option(help="A field to sort by; with - before it, falling")] = "-time",
    limit: Annotated[int, typer.Option(help="Most lines of the table", min=1)] = 30,
    path: Annotated[int | None, typer.Option(help="Only this path of the episode, from its first message")] = None,
    tokens: Annotated[
        Literal["mask", "version", "advantage", "logprob", "gap"] | None,
        typer.Option(help="Show the episode's tokens too, coloured by this"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show the episodes that a run has kept, live or finished; with EPISODE, one of them: its messages and tool calls,
    the reward and its parts, paths and forks."""
    import rillflow

    with clear_errors():
        found = rillflow.trajectories(
            folder,
            step=_whole(step, "--step"),
            policy=policy,
            role=role,
            reward=_pair(reward, "--reward"),
            version=_whole(version, "--version"),
            status=status,
            lane=lane,
            kept=kept,
            prompt=prompt,
        )
        if name is None:
            _table(found, folder, order, limit, as_json=as_json)
        else:
            _episode(found, folder, name, path, tokens, as_json=as_json)


def _table(found: Trajectories, folder: Path, order: str, limit: int, *, as_json: bool) -> None:
    import msgspec

    from rillflow.observe.trajectories.printed import table

    infos, count = found.infos(order, limit=limit), len(found)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(infos), indent=2).decode())
        return
    if not infos:
        raise DataError(
            f"{folder} has kept no episode{'' if len(_unfiltered(folder)) == 0 else ' that fits'}",
            "a run keeps episodes from its first step on, unless observe.trajectories.max_bytes is 0; "
            "without filters all are listed",
        )
    console = Console()
    console.print(table(infos))
    more = f"{len(infos)} of {count} episodes; --limit shows more. " if count > len(infos) else ""
    console.print(
        f"{more}One of them: rillflow show {folder} {infos[0].id}", style="dim", highlight=False, soft_wrap=True
    )


def _unfiltered(folder: Path) -> Trajectories:
    import rillflow

    return rillflow.trajectories(folder)


def _episode(found: Trajectories, folder: Path, name: str, path: int | None, tokens: Any, *, as_json: bool) -> None:
    import json

    from rillflow.observe.trajectories import token_texts
    from rillflow.observe.trajectories.printed import as_json as written
    from rillflow.observe.trajectories.printed import episode

    one = found.get(name)
    if path is not None and not -len(one.paths) <= path < len(one.paths):
        raise ConfigError(f"{name} has {len(one.paths)} paths", "paths are counted from 0")
    if as_json:
        print(json.dumps(written(one), indent=2, default=str))
        return
    console = Console()

    def texts(policy: str, ids: Any) -> list[str]:
        return token_texts(folder, policy, ids)

    for line in episode(one, path=path, colouring=tokens, texts=texts):
        console.print(line, highlight=False, soft_wrap=True)


def _whole(text: str | None, option: str) -> int | tuple[int | None, int | None] | None:
    if text is None or ":" not in text:
        try:
            return None if text is None else int(text)
        except ValueError:
            raise ConfigError(f"{option} {text} is not a number", f"{option} 3, or {option} 3:7") from None
    found = _pair(text, option)
    assert found is not None
    ends = [None if end is None else int(end) for end in found]
    return ends[0], ends[1]


def _pair(text: str | None, option: str) -> tuple[float | None, float | None] | None:
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (float(low) if low else None), (float(high) if high else None)
    except ValueError:
        raise ConfigError(f"{option} {text} is not a range", f"{option} 0.5:1, {option} 0.5: or {option} :1") from None
