"""The local web server of `hebbian play`: it serves one page and hands all work to worker processes.

It listens on 127.0.0.1 only. Other web pages cannot use it, because Host and Origin are checked; it opens no file whose
name a visitor has sent, and holds what each browser tab teaches apart from all others.
"""

import asyncio
import base64
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import reason
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.play import requests
from hebbian_softmax.lab.play.process import Worker
from hebbian_softmax.lab.play.requests import RefusedError, parse

PAGE = {
    "/": ("index.html", "text/html"),
    "/play.js": ("play.js", "text/javascript"),
    "/play.css": ("play.css", "text/css"),
}
LONGEST_BODY = 1 << 20  # bytes that are kept of a request; a saved lesson of 200 drawings needs a third of it
DISCARDED = 1 << 27  # bytes that are read and thrown away, so that the answer to a large upload arrives
BODY_SECONDS = 15.0  # that a request may take to arrive
MOST_SESSIONS = 16  # lessons that are held; the one unused for longest goes first
MOST_REQUESTS = 128  # that are answered at the same time
MOST_CURRICULA = 2  # that run at the same time
ALONE_SECONDS = 20.0  # that a curriculum goes on while nobody watches
HEARTBEAT_SECONDS = 1.0
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

CurriculumCommand = Callable[[dict[str, Any]], Sequence[str]]
"""Returns the command of the worker that trains a curriculum with the settings of the visitor."""


class Guard:
    """Refuses requests from other hosts and pages, and too many at once; sets the headers of every answer."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        names = ("127.0.0.1", "localhost")
        self.hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())  # 80 may be left out
        self.origins = {f"http://{host}" for host in self.hosts}
        self.busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                names = {name for name, _ in extra}
                own = [each for each in message.get("headers", ()) if each[0].lower() not in names]
                message = {**message, "headers": [*own, *extra]}
            await send(message)

        if (refusal := self.refusal(scope)) is not None:
            await refused(refusal.status, str(refusal))(scope, receive, send_with_headers)
            return
        self.busy += 1
        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            self.busy -= 1

    def refusal(self, scope: Scope) -> RefusedError | None:
        """Return why a request is refused, if it is."""

        def all_of(wanted: bytes) -> list[str]:
            return [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted]

        hosts, origins = all_of(b"host"), all_of(b"origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return RefusedError(403, f"this server answers only as {' and '.join(sorted(self.hosts))}")
        changes = scope["method"] not in ("GET", "HEAD")
        if any(origin not in self.origins for origin in origins) or (changes and not origins):
            return RefusedError(403, "only the page of this server may send requests")
        if self.busy >= MOST_REQUESTS:
            return RefusedError(503, f"{MOST_REQUESTS} requests are being answered: try again in a moment")
        return None


class Curriculum:
    """A curriculum that a worker trains for one session, and what it has said so far."""

    def __init__(self, command: Sequence[str]) -> None:
        self.worker = Worker(command, self.hear)
        self.events: list[dict[str, Any]] = []
        self.over = False
        self.watchers, self.alone_since = 0, time.monotonic()
        self.news = asyncio.Event()

    def hear(self, event: dict[str, Any]) -> None:
        """Note what the worker says."""
        if event["event"] == "ended" and not self.over:
            event = {"event": "failed", "error": "the training process has ended unexpectedly"}
        if not self.over:
            self.over = event["event"] in ("finished", "failed", "stopped")
            self.events.append(event)
        self.news.set()
        self.news = asyncio.Event()

    async def stop(self) -> None:
        """End the worker, if it has not ended by itself."""
        self.hear({"event": "stopped"})
        await self.worker.stop()

    @property
    def abandoned(self) -> bool:
        """Whether it trains although nobody has watched for a while."""
        return not self.over and not self.watchers and time.monotonic() - self.alone_since > ALONE_SECONDS

    async def stream(self, seen: int, closing: Callable[[], bool]) -> AsyncIterator[str]:
        """Yield server-sent events from the one with number `seen` on, until the curriculum is over."""
        self.watchers += 1
        try:
            while not closing():
                while seen < len(self.events):
                    event = self.events[seen]
                    seen += 1
                    yield f"id: {seen}\nevent: {event['event']}\ndata: {to_json(event)}\n\n"
                if self.over:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await self.news.wait()
                        continue
                yield ": still here\n\n"
        finally:
            self.watchers -= 1
            self.alone_since = time.monotonic()


class Service:
    """All that the server knows: the classroom's worker, the sessions, and their curricula."""

    def __init__(self, classroom: Sequence[str], curriculum: CurriculumCommand, closing: Callable[[], bool]) -> None:
        self.classroom = Worker(classroom, self.hear)
        self.curriculum_command, self.closing = curriculum, closing
        self.status: dict[str, Any] = {"ready": False, "stage": "starting", "done": 0, "total": 1, "error": None}
        self.material: dict[str, Any] = {}
        self.pictures = b""
        self.sessions: OrderedDict[str, None] = OrderedDict()
        self.curricula: dict[str, Curriculum] = {}
        self.starting = asyncio.Lock()

    def hear(self, event: dict[str, Any]) -> None:
        """Note what the classroom says."""
        kind = event.pop("event")
        if kind == "progress":
            self.status |= event
        elif kind == "ready":
            self.pictures = base64.b64decode(event.pop("pictures"))
            self.material = event
            self.status |= {"ready": True, "stage": "ready", "done": 1, "total": 1}
        elif self.status["error"] is None:
            error = event.get("error", "the process that does the work has ended: start hebbian play again")
            self.status |= {"ready": False, "error": error}
            if not self.closing():
                say(f"hebbian: error: {error}")

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Keep the workers alive as long as the server runs."""
        await self.classroom.start()
        cleaner = asyncio.create_task(self._clean())
        try:
            yield
        finally:
            cleaner.cancel()
            await asyncio.gather(self.classroom.stop(), *(each.stop() for each in self.curricula.values()))

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(ALONE_SECONDS / 4)
            for curriculum in list(self.curricula.values()):  # others may begin and end meanwhile
                if curriculum.abandoned:
                    await curriculum.stop()

    def touch(self, session: str) -> None:
        """Note that a session is in use."""
        if session not in self.sessions:
            raise RefusedError(404, "this lesson is no longer held: reload the page to begin a new one")
        self.sessions.move_to_end(session)

    def ready(self) -> None:
        """Raise a refusal while the network is not ready."""
        if not self.status["ready"]:
            raise RefusedError(
                503, self.status["error"] or "the network is not ready yet: wait until its training is done"
            )

    async def page(self, request: Request) -> Response:
        """Serve one of the three files of the page."""
        name, kind = PAGE[request.url.path]
        content = files("hebbian_softmax.lab.play").joinpath("page", name).read_bytes()
        return Response(content, media_type=kind)

    async def show_status(self, request: Request) -> Response:
        return JSONResponse(self.status)

    async def show_material(self, request: Request) -> Response:
        self.ready()
        return JSONResponse(self.material)

    async def show_pictures(self, request: Request) -> Response:
        self.ready()
        return Response(self.pictures, media_type="application/octet-stream")

    async def begin_session(self, request: Request) -> Response:
        """Go on with a session that is still held, or begin one.

        Beyond the limit, the session that was unused for longest ends.
        """
        kept = requests.parse_session(await read_body(request))
        if kept in self.sessions:
            self.touch(kept)
            return JSONResponse({"session": kept, "curriculum": kept in self.curricula})
        session = secrets.token_urlsafe(16)
        self.sessions[session] = None
        while len(self.sessions) > MOST_SESSIONS:
            oldest, _ = self.sessions.popitem(last=False)
            if (curriculum := self.curricula.pop(oldest, None)) is not None:
                await curriculum.stop()
            await self.classroom.send({"act": "close", "session": oldest, "number": 0})
        return JSONResponse({"session": session, "curriculum": False})

    async def act_in_lesson(self, request: Request) -> Response:
        """Carry out an act in a lesson."""
        values = parse(await read_body(request), requests.LESSON)
        self.touch(values["session"])
        self.ready()
        if "lesson" in values:
            values["taught"] = values.pop("lesson")
        found = await self.classroom.ask(values)
        if values["act"] == "save":
            found = {"format": requests.FORMAT, "version": requests.VERSION, **found}
        return JSONResponse(found)

    async def act_on_curriculum(self, request: Request) -> Response:
        """Start a curriculum, or change the one that runs."""
        values = parse(await read_body(request), requests.CURRICULUM)
        act, session = values.pop("act"), values.pop("session")
        self.touch(session)
        if act == "start":
            async with self.starting:  # two starts at once must not leave a worker that nobody stops
                await self._start_curriculum(session, values)
            return JSONResponse({})
        curriculum = self.curricula.get(session)
        if curriculum is None or curriculum.over:
            raise RefusedError(409, "no curriculum is running: start one first")
        if act == "stop":
            await curriculum.stop()
        else:
            await curriculum.worker.send({"act": act, **values})
            curriculum.hear({"event": act, **values})
        return JSONResponse({})

    async def _start_curriculum(self, session: str, values: dict[str, Any]) -> None:
        others = [each for name, each in self.curricula.items() if name != session and not each.over]
        if len(others) >= MOST_CURRICULA:
            raise RefusedError(503, f"{MOST_CURRICULA} curricula are running in other tabs: stop one of them first")
        if (old := self.curricula.pop(session, None)) is not None:
            await old.stop()
        curriculum = self.curricula[session] = Curriculum(self.curriculum_command(values))
        await curriculum.worker.start()

    async def watch_curriculum(self, request: Request) -> Response:
        """Send what a curriculum says as server-sent events; a browser that reconnects goes on where it was."""
        session = requests.session("session", request.query_params.get("session"))
        self.touch(session)
        if (curriculum := self.curricula.get(session)) is None:
            raise RefusedError(409, "no curriculum is running: start one first")
        last = request.headers.get("last-event-id", "0")
        seen = int(last) if last.isdecimal() and len(last) < 9 else 0
        return StreamingResponse(curriculum.stream(seen, self.closing), media_type="text/event-stream")


async def read_body(request: Request) -> bytes:
    """Return the body of a request of JSON. A long one is read to its end but not kept, and then refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body, length = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= LONGEST_BODY:
                    body += chunk
                elif length > DISCARDED:
                    break
    except TimeoutError:
        raise RefusedError(408, "the request took too long to arrive") from None
    except ClientDisconnect:
        raise RefusedError(400, "the request ended early") from None
    if length > LONGEST_BODY:
        raise RefusedError(413, f"the request is too long: at most {LONGEST_BODY:,} bytes are taken")
    if kind != "application/json":
        raise RefusedError(415, "the request must have the content type application/json")
    return bytes(body)


def refused(status: int, message: str) -> JSONResponse:
    """Return the answer that says why a request was not carried out."""
    return JSONResponse({"error": message}, status)


async def answer_error(request: Request, error: Exception) -> Response:
    """Turn an error into an answer."""
    if isinstance(error, RefusedError):
        return refused(error.status, str(error))
    if isinstance(error, HTTPException):
        return refused(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    say(f"hebbian: error: {reason(error)}")
    return refused(500, "something went wrong in the server")


def create_app(
    port: int, classroom: Sequence[str], curriculum: CurriculumCommand, closing: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Return the application for a port, given the commands of its workers."""
    service = Service(classroom, curriculum, closing)
    routes = [
        *(Route(path, service.page) for path in PAGE),
        Route("/api/status", service.show_status),
        Route("/api/material", service.show_material),
        Route("/api/pictures", service.show_pictures),
        Route("/api/session", service.begin_session, methods=["POST"]),
        Route("/api/lesson", service.act_in_lesson, methods=["POST"]),
        Route("/api/curriculum", service.act_on_curriculum, methods=["POST"]),
        Route("/api/curriculum", service.watch_curriculum),
    ]
    handled: dict[Any, Any] = dict.fromkeys((RefusedError, HTTPException, Exception), answer_error)
    return Guard(Starlette(routes=routes, exception_handlers=handled, lifespan=service.running), port)
