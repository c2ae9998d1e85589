"""Pictures of pages of the built site in a browser without a network, and what is cut on them.

    make site
    python docs/_site/screenshots.py [index.html about/gallery.html ...] [--widths 1400 420]

Without pages, all of the navigation are opened. Ends with 1 if a page is wider than the window, or
if something on it can only be read by scrolling to the side. Needs Chromium.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
WIDTHS = (1400, 420)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", "--remote-debugging-pipe"),
)
CUT = """
[...document.querySelectorAll(".md-content *, .md-content")].filter(each => {
  const style = getComputedStyle(each), box = each.getBoundingClientRect();
  if (!box.width || !box.height || style.visibility === "hidden") return false;
  const hides = style.overflowX !== "visible" && each.scrollWidth > each.clientWidth + 1;
  return hides && style.display !== "inline" || box.right > innerWidth + 1;
}).map(each => `${each.tagName.toLowerCase()}.${each.className}: `
  + each.textContent.trim().slice(0, 60).replace(/\\s+/g, " "))
"""
"""The elements of a page that are wider than their box or than the window."""


class Browser:
    """Chromium without a window and without a network, driven by the protocol of its developer
    tools."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, to), (back, write) = os.pipe(), os.pipe()
        command = [shutil.which("chromium"), *FLAGS, f"--user-data-dir={self._folder.name}"]
        # The browser reads from descriptor 3 and writes to 4.
        moved = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *command, "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(moved, pass_fds=(read, write), **quiet)
        os.close(read), os.close(write)
        self._to, self._back = os.fdopen(to, "wb"), os.fdopen(back, "rb")
        self._count, self._session, self._text = 0, {}, b""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._to.close(), self._back.close()
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": parameters, **self._session}
        self._to.write(json.dumps(asked).encode() + b"\0")
        self._to.flush()
        while True:
            while b"\0" not in self._text:
                if not (piece := self._back.read1(1 << 20)):
                    raise RuntimeError("the browser has ended")
                self._text += piece
            message, _, self._text = self._text.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load a page from disk in a window of this size, and wait for it and its pictures."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + 30
        whole = "document.readyState === 'complete' && location.href !== 'about:blank' &&"
        whole += " [...document.images].every(each => each.complete)"
        while not self.evaluate(f"location.pathname === {json.dumps(str(page))} && {whole}"):
            if time.monotonic() > end:
                raise RuntimeError(f"{page} did not load within 30 s")
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """The value of an expression on the page, run as if the reader had clicked."""
        options = {"returnByValue": True, "userGesture": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write the whole page as a PNG, at most 12,000 pixels high."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000)}
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=clip | {"scale": 1}
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def cut(self) -> list[str]:
        """What cannot be read on the open page without scrolling to the side."""
        return list(self.evaluate(CUT))


def pages(site: Path) -> list[str]:
    """The pages of a built site, without those of the repository's files."""
    found = sorted(str(each.relative_to(site)) for each in site.rglob("*.html"))
    return [name for name in found if not name.startswith("source/") and name != "404.html"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="pages of the site, for example index.html")
    parser.add_argument(
        "--widths", nargs="+", type=int, default=WIDTHS, help="of the window, in pixels"
    )
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build/screenshots", help="folder of the PNGs"
    )
    parser.add_argument("--site", type=Path, default=SITE, help="folder of the built site")
    options = parser.parse_args(arguments)
    site, bad = options.site.resolve(), 0
    with Browser() as browser:
        for page in options.pages or pages(site):
            for width in options.widths:
                browser.open(site / page, width)
                file = options.to / f"{page.removesuffix('.html').replace('/', '-')}-{width}.png"
                browser.picture(file)
                found = browser.cut()
                bad += bool(found)
                print(file, *(f"  cut: {each}" for each in found[:8]), sep="\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
