"""MuJoCo's web viewer, restricted to this machine, with a joystick for velocity commands.

By default the viewer listens on every network interface and answers all requests. Here it listens
on 127.0.0.1 only, binding any other address is refused, and it answers as `etude.core.local_web`
says.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import mujoco
from mujoco.studio import launch_thread, messages, plugin, ux, viewer_protocol, web_viewer
from mujoco.studio.dear_imgui import dear_imgui as imgui
from mujoco.studio.web import web_server
from websockets.http11 import Request, Response

from etude.core.contracts import Array
from etude.core.errors import EtudeError, UsageError, describe_error
from etude.core.local_web import HOST, admitting, url_of
from etude.envs.mujoco import markers
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.decor import aim, decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.rendering import INTEGRATED, MAX_MARKS
from etude.envs.mujoco.simulation import Camera

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_BELOW_TOKEN = rb"""<head>
    <script>
      // The viewer asks for paths from the root; they are below the token of this page's address.
      {
        const root = location.pathname.slice(0, -1);
        const plainFetch = window.fetch;
        window.fetch = (url, ...rest) =>
          plainFetch(/^\/(?!\/)/.test(url) ? root + url : url, ...rest);
        window.WebSocket = class extends WebSocket {
          constructor(url, ...rest) {
            super(url.replace(location.host, location.host + root), ...rest);
          }
        };
      }
    </script>"""
_NAMES, _UNITS = ("x", "y", "yaw"), ("m/s", "m/s", "rad/s")
_KEY_STEP = 0.1
"""Change of the command by an arrow key, m/s or rad/s."""
_guarded, _prepared = threading.Event(), threading.Event()


class Exposed(EtudeError):
    """Raised when a socket would be open to other machines."""


def _guard(event: str, details: tuple[Any, ...]) -> None:
    """Audit hook: refuse to bind a socket to an address outside of this machine."""
    if event == "socket.bind" and _guarded.is_set():
        sock, address = details
        if sock.family in _INTERNET and address[0] not in (HOST, "::1"):
            raise Exposed(
                f"MuJoCo {mujoco.__version__} would open the web viewer to other machines, which "
                "Etude cannot prevent in this version; leave out --web."
            )


def _keep_to_this_machine() -> None:
    """Guard sockets until the window is closed, and answer only the printed address."""
    _guarded.set()
    if _prepared.is_set():
        return
    _prepared.set()
    sys.addaudithook(_guard)  # Audit hooks cannot be removed.
    vars(web_server)["serve"] = _below_token(admitting(web_server.serve))
    vars(web_server)["bind_loopback_socket"] = _InternalSocket.bound
    # The viewer prints an address for other machines, which they cannot reach.
    vars(web_viewer)["print"] = lambda *_, **__: None
    logging.getLogger("WebServer").setLevel(logging.WARNING)


def _below_token(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the viewer's server so that its page asks for paths below the token."""

    def started(*arguments: Any, process_request: Any, **options: Any) -> Any:
        def request_of(connection: Any, request: Request) -> Response | None:
            answer: Response | None = process_request(connection, request)
            if answer is not None and request.path.partition("?")[0] == "/":
                answer.body = (answer.body or b"").replace(b"<head>", _BELOW_TOKEN, 1)
                del answer.headers["Content-Length"]
                answer.headers["Content-Length"] = str(len(answer.body))
            return answer

        return serve(*arguments, process_request=request_of, **options)

    return started


class _InternalSocket(socket.socket):
    """Socket between two threads of the viewer: accepts only connections from this process.

    Without /proc, as on macOS, the owner of a connection is unknown and all are accepted.
    """

    @classmethod
    def bound(cls, port: int = 0) -> _InternalSocket:
        sock = cls(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((HOST, port))
        sock.listen()
        return sock

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if os.path.exists("/proc/net/tcp") and not _is_ours(connection):
            connection.close()
            raise ConnectionAbortedError("a connection of another process")
        return connection, address


def _is_ours(connection: socket.socket) -> bool:
    """Whether this process owns the other end of a connection within this machine."""
    ends = [connection.getpeername(), connection.getsockname()]
    wanted = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
        for host, port in ends
    ]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    links = {f"socket:[{row[9]}]" for row in rows if row[1:3] == wanted}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the folder itself is closed by now
            if os.readlink(f"/proc/self/fd/{name}") in links:
                return True
    return False


class LocalViewer(web_viewer.WebViewer):  # type: ignore[misc]
    """The web viewer, bound to this machine."""

    @property
    def _host(self) -> str:
        return HOST

    @_host.setter
    def _host(self, host: str) -> None:
        """Ignore the constructor's value, which is every interface."""


class Panel(plugin.ViewerPlugin):  # type: ignore[misc]
    """The page's panel beside the simulation; runs in the viewer's thread.

    The simulation's thread writes `lines`, `marks` and, unless a command is `held`, `command`.
    While a command is held, it reads `command`.
    """

    def __init__(self, title: str, shot: Camera, ranges: Array | None) -> None:
        """ranges: [3, 2] of the velocity command; None for tasks without commands."""
        self.ready = threading.Event()
        self.lines: Sequence[str] = ()
        self.marks: list[mujoco.MjvGeom] = []
        self.command = (0.0, 0.0, 0.0)
        self.held = False
        self._title, self._shot, self._ranges = title, shot, ranges

    @messages.handler  # type: ignore[untyped-decorator]
    def _on_start(self, event: plugin.ViewerInitEvent) -> None:
        ux.setup_theme(ux.GuiTheme.LIGHT)
        self.port = event.viewer._http_sock.getsockname()[1]
        self.ready.set()

    @messages.handler  # type: ignore[untyped-decorator]
    def _on_model(self, event: messages.PostModelEvent) -> None:
        aim(self.viewer.camera, self._shot, event.model)

    @messages.handler  # type: ignore[untyped-decorator]
    def _on_update(self, event: messages.UpdateEvent) -> None:
        self.viewer.extra_geoms[:] = self.marks

    @messages.handler  # type: ignore[untyped-decorator]
    def _on_gui(self, event: messages.BuildGuiEvent) -> None:
        plain = imgui.WindowFlags.AlwaysAutoResize, imgui.WindowFlags.NoTitleBar
        imgui.SetNextWindowPos(imgui.Vec2(12, 12), int(imgui.Cond.FirstUseEver))
        imgui.Begin(self._title, flags=sum(map(int, plain)))
        imgui.TextUnformatted(self._title)
        if self._ranges is not None:
            self._joystick(self._ranges)
        for line in self.lines:
            imgui.TextUnformatted(line)
        imgui.End()

    def _joystick(self, ranges: Array) -> None:
        """Sliders for the command; arrow keys change it too, and the space bar sets it to 0."""
        wanted, moved = list(self.command), False
        imgui.PushItemWidth(220)
        for index, (name, unit) in enumerate(zip(_NAMES, _UNITS, strict=True)):
            label, (low, high) = f"{name}, {unit}", ranges[index]
            changed, wanted[index] = imgui.SliderFloat(label, wanted[index], low, high, "%.2f")
            moved |= changed
        imgui.PopItemWidth()
        moved |= self._keys(wanted, ranges)
        if moved:
            self.command, self.held = (wanted[0], wanted[1], wanted[2]), True
        _, self.held = imgui.Checkbox("hold this command", self.held)
        imgui.TextDisabled("up, down: x; left, right: yaw; space: stop")
        imgui.Separator()

    def _keys(self, wanted: list[float], ranges: Array) -> bool:
        """Change the command by the pressed keys; returns whether any was pressed."""
        key = imgui.Key
        steps = {
            key.UpArrow: (0, _KEY_STEP),
            key.DownArrow: (0, -_KEY_STEP),
            key.LeftArrow: (2, _KEY_STEP),
            key.RightArrow: (2, -_KEY_STEP),
        }
        pressed = [step for each, step in steps.items() if imgui.IsKeyPressed(each)]
        for index, step in pressed:
            low, high = ranges[index]
            wanted[index] = min(max(round(wanted[index] + step, 2), low), high)
        if imgui.IsKeyPressed(key.Space, False):
            wanted[:] = 0.0, 0.0, 0.0
            return True
        return bool(pressed)


class BrowserWindow:
    """A web page that shows the running simulation, at `url`."""

    def __init__(self, env: MujocoEnv, title: str, port: int | None) -> None:
        _keep_to_this_machine()
        self._command = env.ability(VelocityCommand)
        shot, ranges = env.task.camera, None if self._command is None else self._command.ranges
        self._panel = panel = Panel(title, shot, ranges)
        panel.held = self._command is not None and self._command.fixed
        if self._command is not None:
            panel.command = tuple(self._command.target[0].tolist())
        config = viewer_protocol.ViewerConfig(title=title, gfx="web", http_port=port or 0)

        def run(endpoint: Any) -> None:
            viewer_protocol.run_viewer_loop(LocalViewer(config, endpoint, plugins=[panel]))

        self._viewer = launch_thread.launch_thread(run)
        try:
            while not panel.ready.wait(0.02):
                self._viewer.is_running()  # raises the error that ended the thread
        except BaseException as error:
            _guarded.clear()
            if isinstance(error, RuntimeError) and port is not None:
                raise UsageError(
                    f"Port {port} is in use: give another --port, or none to use a free one."
                ) from error
            if isinstance(error, EtudeError) or not isinstance(error, Exception):
                raise
            raise UsageError(f"The web viewer did not start: {describe_error(error)}.") from error
        self.url = url_of(panel.port)
        self._model = decorated(env)
        self._data = mujoco.MjData(self._model)
        self._scene = mujoco.MjvScene(self._model, MAX_MARKS)
        self._viewer.set_model(self._model, data=self._data)

    def is_running(self) -> bool:
        return bool(self._viewer.is_running())

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """Show the state of the task's only environment, and apply the joystick's command to it."""
        if self._command is not None:
            self._follow(self._command)
        model, data, scene = self._model, self._data, self._scene
        mujoco.mj_setState(model, data, env.simulation.state[0], INTEGRATED)
        mujoco.mj_forward(model, data)
        scene.ngeom = 0
        legend = markers.draw(scene, model, data, env.markers(0))
        self._panel.lines = (*lines, *(line.text for line in legend))
        self._panel.marks = [copy.copy(geom) for geom in scene.geoms[: scene.ngeom]]
        self._viewer.sync()

    def _follow(self, command: VelocityCommand) -> None:
        if self._panel.held:
            command.hold(self._panel.command)
        else:
            command.fixed = False
            self._panel.command = tuple(command.target[0].tolist())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._viewer.close()
        _guarded.clear()
