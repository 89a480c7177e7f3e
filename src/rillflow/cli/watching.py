"""Commands that show episodes and runs, on the terminal, in a browser or in other programs."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from rich.console import Console

from rillflow.cli.app import RunArgument, app, clear_errors
from rillflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rillflow.runtime.folder import RunFolder
    from rillflow.storage.trajectories import Trajectories

_TRY = "try"


@app.command(_TRY)
def try_one(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, the path of a YAML file, or a run folder")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as policies.agent.sampling.max_tokens=64")
    ] = None,
    *,
    prompt: Annotated[int, typer.Option(help="Which prompt, from 0", min=0, metavar="N")] = 0,
    lane: Annotated[
        Literal["train", "evaluation"], typer.Option(help="A prompt that is trained on, or one that is held out")
    ] = "train",
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers", min=0, show_default="the recipe's")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Instead of the policy: an OpenAI-compatible endpoint, such as https://host/v1; its key is taken from "
            "OPENAI_API_KEY",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --endpoint: the model to ask for")] = None,
    which: Annotated[
        str, typer.Option("--version", help="Of a run: latest, best (by held-out reward) or a number", metavar="V")
    ] = "latest",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print every sampled token with its log-prob")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole episode as JSON")] = False,
) -> None:
    """Play one episode without a run and print it: messages, tool calls, reward and its parts, tokens, forks.

    Exit code 1: the episode failed; the traceback says where. It starts sooner beside a `rillflow warm`.
    """
    from rillflow.observe.run_view import quieten
    from rillflow.runtime import warm

    own = sys.argv[1:2] == [_TRY]  # not of a program that calls this as a function
    if own and (code := warm.run_in_fork(sys.argv[1:], _not_warm)) is not None:
        raise typer.Exit(code)
    quieten()
    from rillflow.cli.trial import Asked, run_trial

    asked = Asked(recipe, tuple(overrides or ()), prompt, seed, lane, which, endpoint, model, tokens)
    with clear_errors():
        raise typer.Exit(run_trial(asked, as_json=as_json))


def _not_warm(why: str) -> None:
    typer.echo(f"starting without the warm process, which takes longer: {why}", err=True)


@app.command()
def status(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Show the state of a run: of a live one from its service, of another from its folder."""
    from rillflow.cli.status import print_status
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print_status(RunFolder.open(folder), json_wanted=as_json)


@app.command()
def top(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder, or one with runs", metavar="[RUN]", show_default="runs")
    ] = None,
    *,
    every: Annotated[float, typer.Option(help="Seconds between two looks", min=0.2)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports once, as JSON")] = False,
) -> None:
    """Watch runs: one line each, refreshed; or all of one. Ctrl-C ends it."""
    from rillflow.cli.status import top as watch

    with clear_errors(), suppress(KeyboardInterrupt):
        watch(folder, every=every, json_wanted=as_json)


@app.command()
def advise(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advisories as JSON")] = False,
) -> None:
    """Say what is wrong with a run, with the numbers behind it, and what to do; of a healthy run, what to tune."""
    from rillflow.cli.reports import print_advice
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print_advice(RunFolder.open(folder), as_json=as_json)


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

    from rillflow.observe.trajectories import table

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

    from rillflow.observe.trajectories import as_json as written
    from rillflow.observe.trajectories import episode, token_texts

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


@app.command()
def dashboard(
    folders: Annotated[list[Path], typer.Argument(help="Run folders; two can be compared", metavar="RUN…")],
    *,
    host: Annotated[str, typer.Option(help="The address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one", min=0, max=65535)] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser")] = False,
    handle: Annotated[int | None, typer.Option("--handle", hidden=True)] = None,
) -> None:
    """Show runs in a browser, finished or running: curves, timeline, accounting, trajectories, logs.

    It only reads. The operator's token (`rillflow token RUN operator`) in place of the one in the printed URL also
    allows to stop a run and to retire a node.
    """
    with clear_errors(role=handle is not None):
        from rillflow.dashboard.server import dashboard_role, run_dashboard

        if handle is not None:
            raise typer.Exit(dashboard_role(folders[0], handle))

        def show(url: str) -> None:
            Console(stderr=True).print(f"dashboard: {url}\nCtrl-C ends it", highlight=False, soft_wrap=True)
            if open_browser:
                typer.launch(url)

        run_dashboard(folders, host=host, port=port, on_ready=show)


@app.command()
def trace(
    folder: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write", show_default="RUN/trace.json", dir_okay=False),
    ] = None,
    episode: Annotated[str | None, typer.Option(help="Print the life of one episode instead", metavar="ID")] = None,
    most: Annotated[int, typer.Option(help="Episodes that are shown, the newest", min=1)] = 20_000,
) -> None:
    """Write a run as a trace for Perfetto: workers, episodes, batches and steps, with arrows from lease to step."""
    from rillflow.cli.reports import print_life, write_trace
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        opened = RunFolder.open(folder)
        if episode is not None:
            print_life(opened, episode)
        else:
            write_trace(opened, output or opened.root / "trace.json", most)


@app.command()
def grafana() -> None:
    """Print a Grafana board of all that services expose: save it as JSON and import it."""
    print(resources.files("rillflow").joinpath("assets", "grafana.json").read_text(), end="")


@app.command()
def prometheus(folder: RunArgument) -> None:
    """Print a scrape configuration for Prometheus: every service of a run, and the reader's token."""
    import yaml

    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print(yaml.safe_dump(scrape_config(RunFolder.open(folder)), sort_keys=False), end="")


def scrape_config(folder: RunFolder) -> dict[str, object]:
    """Return the configuration as Prometheus reads it. Services that come later are not in it."""
    names = sorted(path.stem for path in (folder.root / "endpoints").glob("*.json"))
    found = {name: folder.endpoint(name) for name in names}
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"run": folder.root.name, "service": name}}
        for name, url in found.items()
        if url is not None
    ]
    credentials = {"type": "Bearer", "credentials": folder.token_of("reader")}
    job = {"job_name": "rillflow", "scrape_interval": "5s", "authorization": credentials, "static_configs": targets}
    return {"scrape_configs": [job]}
