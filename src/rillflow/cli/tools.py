"""`rillflow tools`: list the tools of a recipe, or serve them over MCP."""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from rillflow.cli.app import app, clear_errors, errors
from rillflow.errors import ConfigError

if TYPE_CHECKING:
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
        from rillflow.agents.tools.mcp_server import build_server, serve_http, serve_stdio

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
