"""Commands for environments: list them, serve one, step through one."""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from rillflow.cli.app import app, clear_errors
from rillflow.errors import ConfigError

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

    from rillflow.agents.environments.openenv_server import OpenEnvServer
    from rillflow.agents.environments.registry import environment_factory

    server = OpenEnvServer(name, environment_factory(name, options), secrets.token_urlsafe(24))
    url = await server.start(host, port)
    Console().print(f"{name} listens at {url} (the last part is its token); Ctrl-C ends it", soft_wrap=True)
    try:
        await asyncio.Event().wait()  # until a person ends it
    finally:
        await server.close()


async def _play(name: str, agent: Agent, seed: int, split: str, options: dict[str, Any]) -> None:
    from rillflow.agents.environments.pool import close_pools
    from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory
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
