"""Requests to the page of `--web` from other sites, other names and other users: none is answered.

The page itself must be answered after each. All cases share one server, which the first starts.
"""

from __future__ import annotations

import atexit
import json
import random
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

ROW = 32
UNIT = "foreign web requests"
FULL, IN_CI = 100, 15
SECONDS = 60.0
PATHS = ("", "model", "model?total_bytes", "web_client.js", "assets/ignored.ttf", "../model")
SOCKETS = ("state?sid=1", "ui?sid=1", "drop?sid=1")
Headers = list[tuple[str, str]]


@cache
def served() -> tuple[str, int, str]:
    """(host, port, path with the token) of a page that is shown until the tests end."""
    command = [sys.executable, "-m", "etude", "view", "reach", "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    atexit.register(process.wait)
    atexit.register(process.kill)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "http://" in line)
    url = urlsplit(next(word for word in line.split() if word.startswith("http://")))
    assert url.hostname
    assert url.port
    return url.hostname, url.port, url.path


def answer(path: str, headers: Headers, upgrade: bool = False) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request as it is written here; status 0 of none at all."""
    host, port, _ = served()
    if upgrade:
        plain = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
        key = [("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "x3JJHMbDL1EzLkh9GBhXDw==")]
        headers = [*headers, *plain, *key]
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        stream = connection.makefile("rb")
        begin, found = stream.readline(), {}
        status = int(begin.split()[1]) if begin else 0
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(":")
            found[name.lower()] = value.strip()
        body = b"" if status == 101 else stream.read(int(found.get("content-length", -1)))
    return status, found, body


def foreign(rng: random.Random) -> tuple[str, Headers]:
    """A request that its own page would not send: (what is before the path, headers)."""
    _, port, root = served()
    own = f"127.0.0.1:{port}"
    token = root.strip("/")
    place = rng.randrange(len(token))
    other = rng.choice([c for c in "abcXYZ019_-" if c != token[place]])
    host = rng.choice(
        [
            *("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""),
            *(f"localhost.evil.example:{port}", f"[::1]:{port}", f"{own}@evil.example", "0.0.0.0"),
        ]
    )
    origin = rng.choice(
        [
            *("http://evil.example", f"http://{own}.evil.example", f"http://evil.example#{own}"),
            *("null", "file://", f"https://{own}"),
            *(f"http://localhost:{port}", f"http://127.0.0.1:{port + 1}"),
        ]
    )
    wrong = rng.choice(
        [
            *("/", "//", "/%00/", "/é/", f"/?token={token}&", f"/x/../{token}/"),
            *(f"/{token[:-1]}/", f"/{token}x/", f"/{token.swapcase()}/"),
            f"/{token[:place]}{other}{token[place + 1 :]}/",
        ]
    )
    kinds: list[tuple[str, Headers]] = [
        (root, [("Host", host)]),
        (root, [("Host", host), ("Origin", f"http://{host}")]),
        (root, [("Host", own), ("Host", host)]),
        (root, []),
        (root, [("Host", own), ("Origin", origin)]),
        (root, [("Host", own), ("Origin", f"http://{own}"), ("Origin", origin)]),
        (wrong, [("Host", own)]),
        (wrong, [("Host", own), ("Origin", f"http://{own}")]),
        (wrong, [("Host", own), ("Referer", f"http://{own}{root}"), ("Cookie", f"token={token}")]),
    ]
    return rng.choice(kinds)


def case(number: int, seed: int, folder: Path) -> None:
    rng = random.Random(f"{seed}, {number}")
    root, headers = foreign(rng)
    upgrade = rng.random() < 0.5
    path = root + rng.choice(SOCKETS if upgrade else PATHS)
    status, found, body = answer(path, headers, upgrade)
    told = f"{path} {headers} {upgrade}: {status} {found} {body[:80]!r}"
    assert status in (0, 400, 403), told
    assert len(body) < 200, told
    assert b"<" not in body, told
    assert "access-control-allow-origin" not in found, told
    host, port, own = served()
    assert own.strip("/") not in json.dumps(found) + body.decode(errors="replace"), told
    right = [("Host", f"{host}:{port}")]
    status, found, body = answer(own, right)
    assert (status, b"canvas" in body) == (200, True)
    assert "access-control-allow-origin" not in found
    assert (
        answer(f"{own}state?sid=2", [*right, ("Origin", f"http://{host}:{port}")], True)[0] == 101
    )
