"""Web pages for this machine only: who is answered, and a server of a page.

A server listens on 127.0.0.1. It answers only requests for paths below a token, which is in the
printed address, with a Host and an Origin of this machine. So other sites in the same browser and
other users of the machine can neither read nor control what it shows. A cookie would go to every
port of 127.0.0.1; a path does not.
"""

from __future__ import annotations

import hmac
import http
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, unquote

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync import server as sync_server

from etude.core.errors import EtudeError, UsageError

HOST = "127.0.0.1"
TOKEN = secrets.token_urlsafe(24)
FIRST_PORT, PORTS = 8080, 20
"""Ports that are tried if none is chosen."""
_OWN_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")
"""Any port, because the page may be forwarded through a tunnel."""
_HEADERS = {
    "Cross-Origin-Embedder-Policy": "require-corp",  # as the threads of MuJoCo's viewer need it
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def url_of(port: int) -> str:
    """The address of the page on a port, with the token."""
    return f"http://{HOST}:{port}/{TOKEN}/"


def refusal(request: Request) -> str:
    """The reason to refuse a request; "" to answer it, with the token removed from its path."""
    hosts, origins = (request.headers.get_all(name) for name in ("Host", "Origin"))
    if len(hosts) != 1 or not _OWN_HOSTS.fullmatch(hosts[0]):
        return "This page is for 127.0.0.1 and localhost only."
    if origins and origins != [f"http://{hosts[0]}"]:
        return "This page answers no other site."
    _, token, *path = request.path.partition("?")[0].split("/", 2)
    if not (path and hmac.compare_digest(token.encode(), TOKEN.encode())):
        return "Open the whole address that etude printed, with its token."
    request.path = request.path[len(TOKEN) + 1 :]
    return ""


def admitting(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a server of `websockets` so that it refuses requests from other pages."""

    def started(
        *arguments: Any, process_request: Any, process_response: Any = None, **options: Any
    ) -> Any:
        def request_of(connection: Any, request: Request) -> Response | None:
            if refused := refusal(request):
                headers = Headers({"Content-Type": "text/plain", "Connection": "close"})
                return Response(403, "Forbidden", headers, f"{refused}\n".encode())
            answer: Response | None = process_request(connection, request)
            return answer

        def response_of(connection: Any, request: Request, response: Response) -> None:
            if process_response is not None:
                process_response(connection, request, response)
            for name in ("Access-Control-Allow-Origin", *_HEADERS):
                with suppress(KeyError):
                    del response.headers[name]
            response.headers.update(_HEADERS)

        return serve(
            *arguments, process_request=request_of, process_response=response_of, **options
        )

    return started


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    body: bytes
    kind: str = "application/json"
    policy: str = "default-src 'none'"
    """The Content-Security-Policy of a page."""
    status: int = 200

    @classmethod
    def of(cls, document: Any, status: int = 200) -> Answer:
        """A JSON document."""
        return cls(json.dumps(document, allow_nan=False).encode(), status=status)


class PageServer:
    """A server of one page and what it asks for, at `url`, until the `with` statement ends.

    get: (path without the token, query) -> answer. send: (message from the page) -> reply; messages
    come through a web socket, so that no request for a path changes anything.
    """

    def __init__(
        self,
        get: Callable[[str, dict[str, str]], Answer],
        send: Callable[[Any], Any],
        port: int | None,
    ) -> None:
        self._get, self._send = get, send
        logger = logging.getLogger(__name__)
        logger.setLevel(logging.CRITICAL)
        for tried in range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else (port,):
            try:
                self._server = admitting(sync_server.serve)(
                    self._talk, HOST, tried, process_request=self._answer, logger=logger
                )
            except OSError as error:
                if port is not None:
                    raise UsageError(
                        f"Port {port} is in use: give another --port, or none to use a free one."
                    ) from error
            else:
                break
        else:
            raise UsageError(
                f"Ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are in use: give another --port."
            )
        self.url = url_of(self._server.socket.getsockname()[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, connection: Any, request: Request) -> Response | None:
        if "websocket" in request.headers.get("Upgrade", "").lower():
            return None
        path, _, query = request.path.partition("?")
        try:
            found = self._get(unquote(path), dict(parse_qsl(query)))
        except EtudeError as error:
            found = Answer.of({"error": str(error)}, 400)
        except Exception as error:  # a fault of one request must not end the page
            found = Answer.of({"error": f"{type(error).__name__}: {error}"}, 500)
        headers = Headers(
            {
                "Content-Type": found.kind,
                "Content-Length": str(len(found.body)),
                "Content-Security-Policy": found.policy,
                "Cache-Control": "no-store",
                "Connection": "close",
            }
        )
        return Response(found.status, http.HTTPStatus(found.status).phrase, headers, found.body)

    def _talk(self, connection: Any) -> None:
        with suppress(ConnectionClosed):
            for message in connection:
                try:
                    reply = self._send(json.loads(message))
                except (EtudeError, ValueError, RecursionError) as error:
                    reply = {"error": str(error)}
                connection.send(json.dumps(reply))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
