"""The dashboard over HTTP: its routes, the page, what its panels show as JSON, and its process.

Authentication is that of every service: a token of the run on each request. A browser brings it once, in the URL that
was printed, and gets it back as a cookie that scripts cannot read; the page then takes it out of the address bar. The
tokens of the first run open a dashboard of several. Everything reads, but for what the operator's token allows: to stop
a run and to retire a node. Those also need a header that no other site's page can send.

Views are made in one thread, one after the other, so that their readers need no locks and a run's cores are left alone;
advisories, which take longer, in another. A view is tagged (ETag) by what it is made from: while that has not changed,
a page that names the tag is answered without one (304), and nothing is read.

The process is started by hand for any runs, or by a run for itself, on a socket that it hands over.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from rillflow import __version__
from rillflow.dashboard.charts import Advice, run_list
from rillflow.dashboard.panels import PANELS, Other, Panel
from rillflow.dashboard.watched import LiveRun, WatchedRun, watch
from rillflow.errors import BadRequest, Forbidden, RillflowError, Unauthorized
from rillflow.runtime.process import prepare, run_until_signal
from rillflow.types import RetireNode
from rillflow.types.routes import JSON, Route, raw
from rillflow.wire import Service
from rillflow.wire.blocking import in_thread
from rillflow.wire.messages import Request, Response
from rillflow.wire.routing import NotFound
from rillflow.wire.server import Endpoint


class Refused(msgspec.Struct):
    """An error, as the page's scripts read it."""

    error: str
    hint: str


_ERRORS = (Refused,)


class DashboardRoutes:
    """Readers look; the operator stops and retires. `panels` are by their names in URLs."""

    page = raw("GET", "/", "reader", summary="The page", answers={"text/html": ()}, query=("token",))
    static = raw("GET", "/static/{name}", "reader", summary="A file of the page", answers={"text/plain": ()})
    session = raw(
        "GET",
        "/api/session",
        "reader",
        summary="The runs, and what the token allows",
        answers={JSON: ()},
        errors=_ERRORS,
    )
    advisories = raw(
        "GET", "/api/runs/{run}/advisories", "reader", summary="What the run's facts advise", answers={JSON: ()},
        errors=_ERRORS,
    )  # fmt: skip
    stop = raw("POST", "/api/runs/{run}/stop", "operator", summary="Stop a run", answers={JSON: ()}, errors=_ERRORS)
    retire = raw(
        "POST", "/api/runs/{run}/retire", "operator", summary="Retire a node of a run", body=RetireNode,
        again="the earlier end counts", answers={JSON: ()}, errors=_ERRORS,
    )  # fmt: skip
    panels: ClassVar[dict[str, Route[Any, Any]]] = {
        name: raw(
            "GET", f"/api/runs/{{run}}/{name}", "reader", summary=f"The panel `{name}`", answers={JSON: ()},
            errors=_ERRORS, query=panel.query.__struct_fields__,
        )
        for name, panel in PANELS.items()
    }  # fmt: skip


# ---------------------------------------------------------------- requests


Query = TypeVar("Query")

STATIC = Path(__file__).parent / "static"
_HTML = "text/html; charset=utf-8"
_TYPES = {
    ".html": _HTML,
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_OWN_PAGE = "x-rillflow-dashboard"  # a header that a page of another site cannot send without being asked first
_COOKIE_SECONDS = 30 * 86400
_BODY = 64 << 10


class Dashboard(Service):
    """Serves these runs, with the tokens of the first."""

    def __init__(self, runs: list[WatchedRun]) -> None:
        super().__init__("dashboard", runs[0].folder.keyring, body_limit=_BODY)
        self._runs = {run.name: run for run in runs}
        self._live = {run.name: LiveRun(run, run.folder.token_of("reader")) for run in runs}
        self._reader = ThreadPoolExecutor(1, "dashboard-views")
        # Cookies do not tell ports apart: each run has one of its own.
        self._cookie = f"rillflow-{self.keyring.digests['reader'][:12]}"
        self._files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}
        self.raw(DashboardRoutes.page, self._page)
        self.raw(DashboardRoutes.static, self._file)
        self.raw(DashboardRoutes.session, self._session)
        self._adviser, self._advice = ThreadPoolExecutor(1, "dashboard-advice"), Advice()
        self.raw(DashboardRoutes.advisories, self._advisories)
        for name, panel in PANELS.items():
            self.raw(DashboardRoutes.panels[name], self._panel(panel))
        self.raw(DashboardRoutes.stop, self._stop_run)
        self.raw(DashboardRoutes.retire, self._retire)

    async def stop(self) -> None:
        await super().stop()
        for live in self._live.values():
            await live.close()
        for thread in (self._reader, self._adviser):
            thread.shutdown(wait=False, cancel_futures=True)

    def finish(self, response: Response) -> Response:
        response.headers |= _HEADERS
        return response

    # ------------------------------------------------------------ tokens

    def presented(self, request: Request) -> str:
        return _url_token(request) or super().presented(request) or self._cookie_token(request)

    def _cookie_token(self, request: Request) -> str:
        cookies = SimpleCookie()
        try:
            cookies.load(request.headers.get("cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(self._cookie)
        return found.value if found is not None else ""

    def unauthorized(self) -> Unauthorized:
        return Unauthorized(
            "this dashboard needs a token of its run",
            "open the URL that `rillflow run` or `rillflow dashboard` has printed; "
            "`rillflow token RUN reader` prints the token for …/?token=TOKEN",
        )

    def error_response(self, error: RillflowError, request: Request) -> Response:
        if request.path.startswith("/api/"):
            return Response(msgspec.json.encode(Refused(error.message, error.hint)), error.status, media_type=JSON)
        text = f"<!doctype html><meta charset=utf-8><title>Rillflow</title><h1>{html.escape(error.message)}</h1>"
        return Response(f"{text}<p>{html.escape(error.hint)}</p>".encode(), error.status, media_type=_HTML)

    # ------------------------------------------------------------ the page

    async def _page(self, request: Request) -> Response:
        response = self._static("index.html")
        token = _url_token(request)
        if token:
            cookie = SimpleCookie({self._cookie: token})
            cookie[self._cookie].update(
                {"max-age": str(_COOKIE_SECONDS), "path": "/", "httponly": "yes", "samesite": "strict"}
            )
            response.headers["set-cookie"] = cookie[self._cookie].OutputString()
        return response

    async def _file(self, request: Request) -> Response:
        return self._static(request.params["name"])

    def _static(self, name: str) -> Response:
        if name not in self._files:
            raise NotFound(f"unknown file {name[:80]!r}", "reload the page")
        return Response(self._files[name], media_type=_TYPES[Path(name).suffix])

    # ------------------------------------------------------------ views

    async def _session(self, request: Request) -> Response:
        """Answer with the runs that are shown, and whether the caller operates them."""
        token = self.presented(request)
        runs = await self._read(lambda: run_list(list(self._runs.values())))
        for run in runs:
            run["operated"] = self._operates(self._runs[run["name"]], token)
        return _json({"version": __version__, "runs": runs})

    def _panel(self, panel: Panel) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            run = self._run(request.params["run"])
            query: Any = _query(request, panel.query)
            others = [self._run(query.other)] if isinstance(query, Other) else []
            live = await self._live[run.name].now() if panel.live else None
            stamps = [one.stamp(panel.sources) for one in (run, *others)]
            answers = [getattr(live, part, None) for part in panel.live]
            tag = _tag(msgspec.msgpack.encode((stamps, answers, request.query)))
            if _known(request, tag):
                return Response(status=304, headers={"etag": tag})
            return _json(await self._read(lambda: panel.view(run, live, query, *others)), tag)

        return endpoint

    async def _advisories(self, request: Request) -> Response:
        """Answer with the advisories, made in a thread of their own."""
        run = self._run(request.params["run"])
        live = await self._live[run.name].now()
        body = msgspec.json.encode(await in_thread(lambda: self._advice.of(run, live), self._adviser))
        tag = _tag(body)
        if _known(request, tag):
            return Response(status=304, headers={"etag": tag})
        return Response(body, media_type=JSON, headers={"etag": tag})

    async def _read(self, view: Callable[[], Any]) -> Any:
        return await in_thread(view, self._reader)

    def _run(self, name: str) -> WatchedRun:
        if name not in self._runs:
            raise NotFound(f"this dashboard does not show a run {name[:80]!r}", "`rillflow dashboard RUN…` names those")
        return self._runs[name]

    # ------------------------------------------------------------ what an operator may do

    def _operates(self, run: WatchedRun, token: str) -> bool:
        return run.folder.keyring.scope_of(token) == "operator"

    def _operating(self, request: Request) -> tuple[LiveRun, str]:
        """Return the run to operate, and the caller's own token for it."""
        run, token = self._run(request.params["run"]), self.presented(request)
        if _OWN_PAGE not in request.headers:
            raise BadRequest(f"the header {_OWN_PAGE} is missing", "ask from the dashboard's own page")
        if not self._operates(run, token):
            raise Forbidden(
                f"this token is not the operator's of {run.name}", "`rillflow token RUN operator` prints it"
            )
        return self._live[run.name], token

    async def _stop_run(self, request: Request) -> Response:
        live, token = self._operating(request)
        await live.stop(token)
        return _json({"done": True})

    async def _retire(self, request: Request) -> Response:
        live, token = self._operating(request)
        try:
            ask = msgspec.json.decode(await request.read(_BODY), type=RetireNode)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"not a node to retire: {error}", 'send {"node": NAME}') from error
        await live.retire(token, ask)
        return _json({"done": True})


def _url_token(request: Request) -> str:
    """The token in the address of the page; no other address takes one."""
    return request.query_value("token") if request.path == "/" else ""


def _query(request: Request, kind: type[Query]) -> Query:
    try:
        return msgspec.convert({name: values[-1] for name, values in request.query.items()}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{request.path}: {error}", "reload the page") from error


def _json(value: Any, tag: str = "") -> Response:
    headers = {"etag": tag} if tag else {}
    return Response(msgspec.json.encode(value), media_type=JSON, headers=headers)


def _tag(content: bytes) -> str:
    return f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'


def _known(request: Request, tag: str) -> bool:
    return request.headers.get("if-none-match") == tag


async def serve(dashboard: Dashboard) -> None:
    """Until the caller cancels."""
    try:
        await asyncio.Event().wait()
    finally:
        await dashboard.stop()


# ---------------------------------------------------------------- the process


_NICENESS = 15  # of a dashboard beside a run: the run's own processes come first


def run_dashboard(paths: Sequence[Path], *, host: str, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve these runs until a signal; `on_ready` is given the address for the browser."""
    runs = watch(list(paths))
    dashboard = Dashboard(runs)

    async def main() -> None:
        base = await dashboard.start(host, port)
        on_ready(runs[0].folder.dashboard_url(base))
        await serve(dashboard)

    return run_until_signal(main())


def dashboard_role(path: Path, handle: int) -> int:
    """Serve one run as its child, on the listening socket with this file descriptor."""
    os.nice(_NICENESS)
    prepare()
    dashboard = Dashboard(watch([path]))

    async def main() -> None:
        await dashboard.start_on(socket.socket(fileno=handle))
        await serve(dashboard)

    return run_until_signal(main())
