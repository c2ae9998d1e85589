"""What a server of Ray's says to a stranger, in a millisecond and without Ray.

Ray's own client waits where nobody answers, some calls for ever, and does not tell whether a
cluster would let in anybody. All its servers speak gRPC, which is HTTP/2.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _header(name: str, value: str) -> bytes:
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
_QUESTION = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/ray.rpc.NodeInfoGcsService/CheckAlive",
    ":authority": "ray",
    "te": "trailers",
    "content-type": "application/grpc",
}
_CALL = _frame(1, 4, 1, b"".join(map(_header, _QUESTION, _QUESTION.values())))
_CALL += _frame(0, 1, 1, bytes(5))
_DONE = b"grpc-status\x010"
_MOST = 1 << 16
"""Bytes of an answer that are read."""


def answers(address: tuple[str, int], seconds: float) -> bool:
    """Whether a server lives: one that was ended refuses, and a frozen one says nothing."""
    try:
        with socket.create_connection(address, seconds) as line:
            line.sendall(_GREETING)
            line.recv(1)
    except OSError:
        return False
    return True


def end_of(socket_file: str) -> select.poll | None:
    """What to `poll(0)` to learn whether the process behind a socket file has ended: [] while it
    lives. None where this system does not tell who that is."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(socket_file)
            pid, _, _ = struct.unpack(
                "3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
    except (OSError, AttributeError):  # Linux alone has both.
        return None
    return ended


def is_open(address: tuple[str, int], seconds: float) -> bool:
    """Whether the head of a cluster does what it is asked without a token."""
    said = b""
    try:
        with socket.create_connection(address, seconds) as line:
            line.sendall(_GREETING + _CALL)
            while b"grpc-status" not in said[:-2] and len(said) < _MOST:
                said += line.recv(4096) or bytes(_MOST)
    except OSError:
        return False
    return _DONE in said


def split(address: str) -> tuple[str, int]:
    """(host, port) of host:port; port 0 where there is none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else (address, 0)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
