"""Commands about what agents use: tools, rewards, environments and the sandbox."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rillflow.cli.app import app, clear_errors, errors
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rillflow.config import ToolConfig
    from rillflow.contracts import Toolbox

TOKEN = "RILLFLOW_TOOLS_TOKEN"
_PLAIN = ("calculator", "python")  # shipped tools that need no options


@app.command(rich_help_panel="What agents use, and how good they are")
def tools(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name or path", show_default="tools that need no options")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe")] = None,
    *,
    serve: Annotated[
        Literal["stdio", "http"] | None, typer.Option(help="Offer them to other agents, as an MCP server")
    ] = None,
    port: Annotated[int, typer.Option(help="With --serve http: on loopback; 0 for any", min=0, max=65535)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the schemas as models get them")] = False,
) -> None:
    """List the tools of a recipe with their arguments, or serve them over MCP.

    Over HTTP every call has to show the token in RILLFLOW_TOOLS_TOKEN; where that is not set one is made and printed.
    """
    import asyncio

    with clear_errors():
        if port and serve != "http":
            raise ConfigError("--port is where an MCP server listens", "give --serve http with it")
        asyncio.run(_main(_configs(recipe, overrides or []), serve, port, as_json=as_json))


def _configs(recipe: str | None, overrides: list[str]) -> list[ToolConfig]:
    from rillflow.config import ToolConfig, load_recipe

    if recipe is None:
        return [ToolConfig(name=name) for name in _PLAIN]

    found = load_recipe(recipe, overrides).tools
    if not found:
        raise ConfigError(f"{recipe} names no tools", "give it `tools:`, see docs/tools.md")
    return found


async def _main(configs: list[ToolConfig], serve: str | None, port: int, *, as_json: bool) -> None:
    from rillflow.agents.tools.toolbox import open_toolbox

    toolbox = await open_toolbox(configs)
    try:
        if serve is None:
            _show(toolbox, as_json=as_json)
            return
        from rillflow.agents.tools.mcp_tools import build_server, serve_http, serve_stdio

        server = build_server(toolbox)
        if serve == "stdio":
            await serve_stdio(server)
        else:
            token, made = _token()
            told = f", Authorization: Bearer {token}" if made else ""
            await serve_http(server, token, port, lambda url: _say(f"{url}{told}"))
    finally:
        await toolbox.close()


def _token() -> tuple[str, bool]:
    given = os.environ.get(TOKEN)
    return (given, False) if given else (secrets.token_urlsafe(24), True)


def _say(text: str) -> None:
    # To standard error: standard output belongs to the protocol.
    errors.print(text, highlight=False, soft_wrap=True)


def _show(toolbox: Toolbox, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(toolbox.schemas, indent=2))
        return
    console = Console()
    for schema in toolbox.schemas:
        function = schema["function"]
        console.print(f"[bold]{function['name']}[/]  {escape(function['description'])}", highlight=False)
        required = function["parameters"].get("required", ())
        for name, about in function["parameters"].get("properties", {}).items():
            kind = about.get("type") or json.dumps(about)
            rest = f"  {about['description']}" if "description" in about else ""
            need = "" if name in required else ", optional"
            console.print(f"  {name} ({kind}{need}){rest}", highlight=False, markup=False)


@app.command(rich_help_panel="What agents use, and how good they are")
def rewards(
    name: Annotated[str | None, typer.Argument(help="One of them, with its options", show_default=False)] = None,
) -> None:
    """List the rewards that a recipe can name, or the options of one."""
    from rillflow.agents.rewards.registry import REWARDS, reward_class

    console = Console()
    with clear_errors():
        if name is not None:
            kind = reward_class(name)
            console.print(_first_line(kind), soft_wrap=True, highlight=False)
            console.print(_option_table(kind.model_fields))
            return
        table = Table("reward", "what it gives", "options")
        for each, kind in REWARDS.items():
            table.add_row(each, _first_line(kind), ", ".join(kind.model_fields))
        console.print(table)
        console.print("or module:function and file.py:function, `def reward(payload, answer) -> float`", style="dim")


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _option_table(fields: dict[str, FieldInfo]) -> Table:
    table = Table("option", "default", "meaning")
    for name, field in fields.items():
        default = "needed" if field.is_required() else "" if field.default is None else str(field.default)
        table.add_row(name, default, field.description or "")
    return table


OptionsOption = Annotated[list[str] | None, typer.Option("--option", help="Of the environment, such as steps=20")]
Agent = Literal["person", "random", "gold"]
_WRONG = "look"  # said by a random agent where the environment lists no actions


@app.command(rich_help_panel="What agents use, and how good they are")
def environments(
    serve: Annotated[str | None, typer.Option(help="Offer this one as an OpenEnv server", metavar="ENV")] = None,
    host: Annotated[str, typer.Option(help="With --serve: the address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve: the port; 0 takes a free one")] = 0,
    option: OptionsOption = None,
) -> None:
    """List the environments that agents can act in, or serve one to others."""
    import asyncio

    from rillflow.agents.environments.registry import ENVIRONMENTS

    with clear_errors():
        if serve is not None:
            asyncio.run(_serve(serve, host, port, _options(option)))
            return
    shown = Table("name", "what it is", "needs", box=None, pad_edge=False)
    for name, known in ENVIRONMENTS.items():
        shown.add_row(name, known.about, known.needs.replace("[", "\\["))
    Console().print(shown)


@app.command(rich_help_panel="What agents use, and how good they are")
def play(
    environment: Annotated[str, typer.Argument(help="A name of `rillflow environments`, or module:Class")],
    agent: Annotated[Agent, typer.Option(help="Who plays")] = "person",
    seed: Annotated[int, typer.Option(help="Which of the worlds")] = 0,
    split: Annotated[str, typer.Option(help="train or heldout")] = "train",
    option: OptionsOption = None,
) -> None:
    """Step through an environment in the terminal."""
    import asyncio

    with clear_errors():
        asyncio.run(_play(environment, agent, seed, split, _options(option)))


def _options(given: list[str] | None) -> dict[str, Any]:
    import yaml

    options = {}
    for item in given or ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--option {item} must look like name=value", "for example --option steps=20")
        options[name] = yaml.safe_load(value)
    return options


async def _serve(name: str, host: str, port: int, options: dict[str, Any]) -> None:
    import asyncio

    from rillflow.agents.environments.openenv import OpenEnvServer
    from rillflow.agents.environments.registry import environment_factory

    server = OpenEnvServer(name, environment_factory(name, options), secrets.token_urlsafe(24))
    url = await server.start(host, port)
    Console().print(f"{name} listens at {url} (the last part is its token); Ctrl-C ends it", soft_wrap=True)
    try:
        await asyncio.Event().wait()  # until a person ends it
    finally:
        await server.close()


async def _play(name: str, agent: Agent, seed: int, split: str, options: dict[str, Any]) -> None:
    from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory
    from rillflow.agents.processes import close_pools
    from rillflow.config import resolve_object

    known = ENVIRONMENTS.get(name)
    if agent == "gold" and name in ("textworld_express", "scienceworld", "alfworld"):
        options = {"gold": True, **options}
    environment = environment_factory(name, options)()
    payload: dict[str, Any] = {}
    if known is not None and known.prompts is not None:
        own = {key: options[key] for key in ("folder", "size", "game", "task", "dataset") if key in options}
        payload = next(resolve_object(known.prompts)(split=split, count=1, seed=seed, **own))["payload"]
    try:
        await _episode(environment, _chooser(environment, agent, seed), payload, seed)
    finally:
        await environment.close()
        close_pools()


Choose = Callable[[list[str] | None], Awaitable[str]]


def _chooser(environment: Any, agent: Agent, seed: int) -> Choose:
    import asyncio

    draw = random.Random(seed)
    plan: list[str] = []

    async def person(_: list[str] | None) -> str:
        return str(await asyncio.to_thread(typer.prompt, "", prompt_suffix="> "))

    async def drawn(actions: list[str] | None) -> str:
        return draw.choice(actions) if actions else _WRONG

    async def gold(_: list[str] | None) -> str:
        if not plan:
            if not hasattr(environment, "plan"):
                raise ConfigError("this environment has no gold player", "play it as --agent person or random")
            plan.extend(await environment.plan())
        if not plan:
            raise ConfigError("the gold player knows no way from here", "play another --seed")
        return plan.pop(0)

    return {"person": person, "random": drawn, "gold": gold}[agent]


async def _episode(environment: Any, choose: Choose, payload: dict[str, Any], seed: int) -> None:
    console = Console(highlight=False, markup=False)
    seen = await environment.reset(payload, seed)
    total = 0.0
    while True:
        console.print(seen.text)
        if seen.done:
            break
        if seen.actions:
            console.print(f"  possible: {'; '.join(seen.actions[:20])}{' …' if len(seen.actions) > 20 else ''}")
        action = await choose(seen.actions)
        console.print(f"> {action}")
        seen = await environment.step(action)
        total += seen.reward
    console.print(f"reward {total:g}, {'won' if seen.info.get('won') else 'not won'}")


@app.command(rich_help_panel="What agents use, and how good they are")
def sandbox(
    isolation: Annotated[
        Literal["bubblewrap", "process"], typer.Option(help="Which isolation to check")
    ] = "bubblewrap",
) -> None:
    """Check the sandbox on this machine: start it, attack it, and say what holds."""
    from rillflow.agents.sandbox.sandbox import check

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
