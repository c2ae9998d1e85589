"""An S3 server on 127.0.0.1 (moto), and a relay before it that loses, delays and doubles requests.

with serving() as bucket, environment(bucket.endpoint):
    with Relay(bucket.endpoint, chance=0.05) as relay, environment(relay.endpoint): ...
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

BUCKET = "etude-tests"
KEY, SECRET = "AKIAETUDETESTKEY0000", "s3cretOfTheTestsThatIsNowhereWritten"
FAULTS = ("refused", "lost request", "lost answer", "late", "doubled", "silent", "slow")


class Server(NamedTuple):
    """A running S3 server with an empty bucket."""

    endpoint: str


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """An S3 server that ends with the block."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for path, method in (("moto-api/reset", "POST"), (BUCKET, "PUT")):
            asked = urllib.request.Request(f"{endpoint}/{path}", method=method)
            urllib.request.urlopen(asked).close()
        yield Server(endpoint)
    finally:
        server.stop()


def variables(endpoint: str, cache: Path | None = None) -> dict[str, str]:
    """Environment variables for a server; cache: where local folders of runs are."""
    found = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    return found | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})


def environment(
    endpoint: str, cache: Path | None = None
) -> contextlib.AbstractContextManager[object]:
    """The environment of this process with the variables for a server."""
    return patch.dict(os.environ, variables(endpoint, cache))


class Relay:
    """Passes requests on to a server; a share of them, `chance`, meets a fault.

    rate: bytes per second in both directions together. Conditional writes are passed on one at a
    time, since moto compares and writes in two steps.
    """

    def __init__(
        self,
        endpoint: str,
        chance: float = 0.0,
        seed: int = 0,
        rate: float | None = None,
        silence: float = 8.0,
        latest: float = 6.0,
    ) -> None:
        """silence: seconds until a request that gets no answer is closed; latest: until one that
        was lost arrives after all."""
        self.chance, self.rate, self.silence, self.latest = chance, rate, silence, latest
        self.faults, self.requests = Counter[str](), 0
        self.bytes = 0
        self.commits: list[tuple[str, int, int, str]] = []
        """(path, epoch, serial, writer) of every index that was written, in order."""
        self._server = endpoint.removeprefix("http://")
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._conditional = threading.Lock()
        self._free = 0.0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listening.server_port}"

    def __enter__(self) -> Relay:
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def handle_any(self) -> None:
                relay._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        class Listening(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None: ...  # clients that went away

        self._listening = Listening(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._listening.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown()
        self._listening.server_close()

    def _chosen(self) -> tuple[str, float]:
        with self._lock:
            self.requests += 1
            if self._random.random() >= self.chance:
                return "", 0.0
            fault = self._random.choice(FAULTS)
            self.faults[fault] += 1
            return fault, self._random.uniform(0.1, self.latest)

    def _limit(self, count: int) -> None:
        """Wait until a line of `rate` has carried these bytes."""
        self.bytes += count
        if self.rate is None:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self.rate
            wait = self._free - time.monotonic()
        time.sleep(max(wait, 0.0))

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self._limit(len(body) + 500)
        headers = dict(request.headers.items())
        whole = request.command, request.path, body, headers
        fault, seconds = self._chosen()
        if fault == "refused":
            request.send_response(503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if fault in ("lost request", "late", "silent"):
            if fault == "late":
                threading.Timer(seconds, self._pass_on, whole).start()
            if fault == "silent":
                time.sleep(self.silence)
            request.close_connection = True
            return
        if fault == "slow":
            time.sleep(seconds / 2)
        status, answer, found = self._pass_on(*whole)
        if fault == "doubled":
            status, answer, found = self._pass_on(*whole)
        if fault == "lost answer":
            request.close_connection = True
            return
        request.send_response(status)
        for name, value in answer:
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date"):
                request.send_header(name, value)
        length = next((v for n, v in answer if n.lower() == "content-length"), str(len(found)))
        size = length if request.command == "HEAD" else str(len(found))
        request.send_header("Content-Length", size)
        request.end_headers()
        self._limit(len(found) + 300)
        request.wfile.write(found)

    def _pass_on(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        is_conditional = any(name.lower() in ("if-match", "if-none-match") for name in headers)
        lock = self._conditional if is_conditional else contextlib.nullcontext()
        with lock, contextlib.closing(http.client.HTTPConnection(self._server, timeout=60)) as line:
            line.request(method, path, body, headers)
            answer = line.getresponse()
            if method == "PUT" and path.endswith("/run.json") and answer.status == 200:
                index = json.loads(body)
                self.commits.append((path, index["epoch"], index["serial"], index["writer"]))
            return answer.status, answer.getheaders(), answer.read()


def main() -> None:
    """Serve until standard input ends: a relay with faults before a server.

    Prints {"server", "relay"}: their endpoints; at the end the number of requests, their faults,
    and the commits: [index, epoch, serial, writer] of each index that was written.
    """
    chance, seed = float(sys.argv[1]), int(sys.argv[2])
    with serving() as server, Relay(server.endpoint, chance, seed) as relay:
        print(json.dumps({"server": server.endpoint, "relay": relay.endpoint}), flush=True)
        sys.stdin.read()
        counts = {"requests": relay.requests, "commits": relay.commits}
        counts |= {"faults of requests": relay.faults}
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
