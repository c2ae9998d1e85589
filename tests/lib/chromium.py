"""A headless Chromium that runs a page's script: for tests of pages, and for their pictures."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import connect

STARTS = 60.0
"""Seconds that a busy machine may take to begin."""
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-port=0"
)


def find() -> str | None:
    """Chromium's path; None if it is not installed."""
    return shutil.which("chromium")


class Browser:
    """One page in a browser that ends with the `with` statement."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        """profile: a new folder for the browser's files."""
        path = find()
        assert path is not None
        self._process = subprocess.Popen(
            [path, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._sent, self._opened = 0, ExitStack()
        try:
            found = self._wait_for(profile / "DevToolsActivePort").split()
            address = f"ws://127.0.0.1:{found[0]}{found[1]}"
            self._socket = self._opened.enter_context(connect(address, max_size=None))
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session: str | None = attached["sessionId"]
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    _session = None

    def _wait_for(self, file: Path) -> str:
        until = time.monotonic() + STARTS
        while time.monotonic() < until:
            if file.is_file() and len(text := file.read_text().split()) == 2:
                return " ".join(text)
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while (reply := json.loads(self._socket.recv(timeout=STARTS))).get("id") != self._sent:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        """Load an address anew, also if only its part after # differs."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + STARTS
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition}: {self.run('document.body.innerText')[:2000]}")
            time.sleep(0.05)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key, as a person does."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **text
            )

    def picture(self, path: Path, full: bool = False) -> None:
        """Write the page as PNG; full: also what is below the window."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._opened.close()
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
