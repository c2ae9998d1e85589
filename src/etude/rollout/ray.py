"""Workers as Ray actors, and the connection to a cluster.

Ray uses pickle between our own processes; nothing of it is stored. Anyone who can reach a Ray
cluster can run code on it, other users of this machine too, so a cluster must require a token.
"""

from __future__ import annotations

import atexit
import importlib.util
import ipaddress
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.core import user_code
from etude.core.contracts import BatchEnv, Broadcast, Collector, Policy
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.data.segments import SegmentBuffer
from etude.rollout.elastic import Answered, ElasticCollector, Event, HeadLost, Heard, Joined, Lost
from etude.rollout.host import Answer, Blueprint, Failure, Hello, Host, Task
from etude.rollout.local import CollectorConfig, Workers
from etude.rollout.schedule import Patience, Schedule
from etude.runs.manifest import PREFIXES

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray uses the loopback address; otherwise it replaces it by an external one, even if
loopback is requested. Read when Ray is imported."""
HEAD_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Seconds after losing the head until Ray exits a process without a message, 60 by default. A run
gives up earlier and with a report, but only while it collects, and an update may take long."""
HEALTH_CHECKS = "RAY_health_check_failure_threshold"
"""Failed health checks, one in 3 s, until the head declares a machine lost: 5 by default. Ray then
looks for the driver's objects in that machine's store, which ended with its process, and exits the
driver without a message."""
LEAST_STORE = 128 << 20
LOOK_SECONDS = 1.0
"""Seconds between two checks of the cluster's machines and servers."""
MOST_HANDED = 4
"""The maximum number of times that a broadcast is put into the object store, if workers cannot
fetch it."""
LEAVE_SECONDS = 10.0
"""Seconds for Ray to leave a cluster that does not answer."""
RAYLET = "Ray's process on this machine"


def check(address: str) -> None:
    """Raise an error if the cluster cannot be used, before anything is written."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "collector.kind is ray, but Ray is not installed: `pip install etude[ray]`, or train "
            "with --collector.kind local."
        )
    if address not in ("local", "auto"):
        user_code.check_trust(
            address, f"exchange objects that are code with the Ray cluster at {address}"
        )
    if address != "local":
        check_address(find_address(address))


class RayCollectorConfig(CollectorConfig):
    """Rollouts on the actors of a Ray cluster."""

    def check(self) -> None:
        check(self.address)

    def plan_text(self) -> str:
        actors = f"{self.actors:,}" if self.actors else "one per machine,"
        return f"on Ray actors: {actors} of {self.threads:,} threads, {self.address} cluster"

    def build(
        self,
        make_env: Callable[[], BatchEnv],
        make_policy: Callable[[], Policy],
        buffers: Sequence[SegmentBuffer],
        key: Key,
        workers: Workers,
        local: range,
        exact: bool,
        code: tuple[str, ...] = (),
    ) -> Collector:
        views = [[b.part(self.part(g)) for g in local] for b in buffers]
        one = replace(buffers[0].spec, num_envs=self.envs_per_group)
        blueprint = Blueprint(make_env, make_policy, one, key, self.threads, code)
        # Room for the fragments of an iteration, and earlier ones that are not released yet.
        room = 3 * buffers[0].spec.num_bytes
        fleet = RayFleet(blueprint, self.actors, self.address, room, exact)
        here = Host(blueprint, workers)
        return ElasticCollector(
            fleet,
            Schedule(self.num_groups, self.threads, Patience(self.deadline)),
            views,
            here.probe if exact else None,
            self.allow_inexact,
            workers.close,
            code=here.code() if exact else {},
        )


class Actor:
    """A host of groups in a process of Ray."""

    def __init__(self, blueprint: Blueprint, folder: str) -> None:
        if os.path.isdir(folder):  # The user's tasks are imported from there.
            os.chdir(folder)
        self._host = Host(blueprint)

    def hello(self, broadcast: Broadcast | None) -> Hello:
        import ray

        return self._host.hello(broadcast, ray.util.get_node_ip_address())

    def run(self, broadcast: list[Any], task: Task) -> Answer:
        """broadcast: a list with its reference, which is fetched once per machine and serial."""
        import ray

        if not self._host.knows(task.serial):
            self._host.follow(task.serial, ray.get(broadcast[0]))
        return self._host.run(task)

    def pulse(self) -> None:
        """A ping, answered while a task runs."""


class RayFleet:
    """Actors on a cluster: a given number, or one on every machine."""

    def __init__(
        self,
        blueprint: Blueprint,
        actors: int | None,
        address: str,
        store_bytes: int,
        probed: bool = True,
    ) -> None:
        """store_bytes: size of the object store. probed: whether new workers must compute the same
        bits."""
        check(address)
        self._own = connect(address, (actors or 1) * blueprint.threads, store_bytes)
        self._at_home = self._own and address == "local"
        import ray

        self._ray: Any = ray
        self._servers, socket_file = _servers(ray)
        self._raylet = end_of(socket_file)
        self._asked = 0.0
        self._silent: tuple[str, float] | None = None  # who, and since when
        self._threads, self._actors = blueprint.threads, actors
        self._blueprint = ray.put(blueprint)
        self._remote = ray.remote(Actor)
        self._options = {
            "num_cpus": blueprint.threads,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 2,  # a task, and a pulse beside it
            "runtime_env": {"env_vars": environment()},
        }
        self._handles: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._greeted: set[int] = set()
        self._flights: dict[Any, tuple[str, int, Task | None, list[Any]]] = {}
        self._next = self._refused = 0
        self._barred: set[str] = set()
        self._looked = 0.0
        self._current: Broadcast | None = None
        self._serial = self._handed = 0
        self._first: Broadcast | None = None
        self._broadcast: list[Any] = []
        self._probed, self._probe = probed, None

    @property
    def joining(self) -> int:
        return len(self._handles) - len(self._greeted)

    def _check_raylet(self) -> None:
        """Raise `HeadLost` if Ray's process on this machine has ended.

        The driver's object store ends with that process, and Ray exits the driver without a message
        in the next call that puts or gets an object: call this before each of them.
        """
        if self._raylet is not None and self._raylet.poll(0):
            raise HeadLost(RAYLET, "has ended")

    def silent(self, seconds: float) -> tuple[str, float] | None:
        self._check_raylet()
        return self._unresponsive(seconds)

    def _unresponsive(self, seconds: float) -> tuple[str, float] | None:
        """The server that does not answer, and for how long; waits for at most `seconds`."""
        wait = self._asked + LOOK_SECONDS - time.monotonic()
        if wait > 0.0 and self._silent is not None:
            time.sleep(min(wait, seconds))
        elif wait <= 0.0:
            silent = [who for who, at in self._servers.items() if not answers(at, LOOK_SECONDS)]
            self._asked = time.monotonic()
            since = self._asked if self._silent is None else self._silent[1]
            self._silent = (silent[0], since) if silent else None
        return self._silent and (self._silent[0], time.monotonic() - self._silent[1])

    def broadcast(self, serial: int, broadcast: Broadcast) -> None:
        self._current, self._first = broadcast, self._first or broadcast
        self._serial, self._handed = serial, 1
        self._broadcast = [self._put(broadcast)]

    def _put_again(self, broadcast: list[Any]) -> bool:
        """Put a broadcast again that a worker could not fetch; False after `MOST_HANDED` times."""
        if broadcast is self._broadcast:
            if self._handed == MOST_HANDED:
                return False
            self._handed += 1
            self._broadcast = [self._put(self._current)]
        return True

    def _put(self, value: Any) -> Any:
        self._check_raylet()
        try:
            return self._ray.put(value)
        except self._ray.exceptions.RayError as error:
            raise EtudeError(f"Ray cannot take the broadcast: {_words(error)}") from error

    def recruit(self) -> None:
        if self._actors is not None:
            while len(self._handles) + self._refused < self._actors:
                self._hire("SPREAD", "")
            return
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        pin = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        large = [n["NodeID"] for n in alive if n["Resources"].get("CPU", 0) >= self._threads]
        if not large and not self._next:
            raise UsageError(
                f"No machine of the Ray cluster has {self._threads} cores for an actor: lower "
                "--collector.threads, or start Ray with more --num-cpus."
            )
        taken = {*self._nodes.values(), *self._barred}
        for node in large:
            if node not in taken:
                self._hire(pin(node, soft=False), node)

    def _hire(self, strategy: Any, node: str) -> None:
        if self._probed and self._probe is None:
            self._probe = self._put(self._first)
        worker, self._next = self._next, self._next + 1
        made = self._remote.options(**self._options, scheduling_strategy=strategy)
        self._handles[worker] = handle = made.remote(self._blueprint, os.getcwd())
        self._nodes[worker] = node
        self._flights[handle.hello.remote(self._probe)] = ("hello", worker, None, [])

    def send(self, worker: int, task: Task) -> None:
        flight = self._handles[worker].run.remote(self._broadcast, task)
        self._flights[flight] = ("run", worker, task, self._broadcast)

    def ask(self, worker: int) -> None:
        if ("pulse", worker, None, []) not in self._flights.values():
            self._flights[self._handles[worker].pulse.remote()] = ("pulse", worker, None, [])

    def events(self, seconds: float) -> list[Event]:
        flights = list(self._flights)
        if not flights:
            time.sleep(seconds)
            return []
        try:
            ready, _ = self._ray.wait(flights, num_returns=1, timeout=seconds)
            if ready and len(flights) > 1:
                ready, _ = self._ray.wait(flights, num_returns=len(flights), timeout=0)
        except OSError:  # The connection to Ray's process on this machine broke.
            self._check_raylet()
            raise
        return [event for flight in ready if (event := self._landed(flight)) is not None]

    def _landed(self, flight: Any) -> Event | None:
        if flight not in self._flights:  # Its worker was lost with another flight.
            return None
        kind, worker, task, broadcast = self._flights.pop(flight)
        errors = self._ray.exceptions
        self._check_raylet()
        try:
            value = self._ray.get(flight)
        except errors.RayTaskError as error:
            if task is not None:
                unfetched = isinstance(error.cause, errors.RayError)
                if unfetched and task.serial == self._serial and self._put_again(broadcast):
                    self.send(worker, task)
                    return None
                failed = Failure(_words(error.cause or error).rstrip("."), str(error))
                answer = Answer(task.iteration, dict.fromkeys(task.groups, failed), 0.0)
                return Answered(worker, answer)
            self._forget(worker)
            return Lost(worker, _words(error.cause or error))
        except errors.RayError as error:
            self._forget(worker)
            return Lost(worker, _reason(error))
        if kind == "pulse":
            return Heard(worker)
        if kind == "run":
            return Answered(worker, value)
        self._greeted.add(worker)
        return Joined(worker, value)

    def drop(self, worker: int, replace: bool = True) -> None:
        handle, node = self._handles.get(worker), self._nodes.get(worker)
        self._forget(worker)
        if handle is not None:
            self._ray.kill(handle)
        if not replace:
            self._refused += 1
            self._barred.add(node or "")

    def _forget(self, worker: int) -> None:
        if worker in self._handles and worker not in self._greeted:
            self._probe = None  # The worker may have failed to fetch it.
        self._handles.pop(worker, None)
        self._nodes.pop(worker, None)
        self._greeted.discard(worker)
        self._flights = {f: of for f, of in self._flights.items() if of[1] != worker}

    def close(self) -> None:
        self._asked = 0.0
        if self._unresponsive(0.0) is not None:
            self._leave()
            return
        for worker in list(self._handles):
            self.drop(worker)
        self._broadcast, self._probe = [], None
        if self._own:
            self._ray.shutdown()

    def _leave(self) -> None:
        """Leave a cluster that does not answer; kill the processes of a cluster of this run."""
        if not self._own:
            return
        atexit.unregister(self._ray.shutdown)
        if self._at_home:
            node = self._ray._private.worker._global_node
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        leaving = threading.Thread(target=self._ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)
        if leaving.is_alive():
            _STUCK.set()


_STUCK = threading.Event()


@atexit.register
def _end() -> None:
    """Exit a process that hangs in Ray's shutdown: Python would crash otherwise."""
    if _STUCK.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _servers(ray: Any) -> tuple[dict[str, tuple[str, int]], str]:
    """The addresses of Ray's processes that a run depends on, and the socket file of the one on
    this machine."""
    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    servers = {
        f"The head of the Ray cluster at {context.gcs_address}": split(context.gcs_address),
        RAYLET: (here["NodeManagerAddress"], here["NodeManagerPort"]),
    }
    return servers, here["RayletSocketName"]


def _words(error: BaseException) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split())


def _reason(error: Exception) -> str:
    """Describe why an actor was lost."""
    lines = str(error).strip().splitlines()
    if "creation task" in str(error):
        return f"it could not start: {lines[-1].strip()}"
    known = {
        "ActorDiedError": "its process ended",
        "ActorUnavailableError": "it cannot be reached",
        "ActorUnschedulableError": "the cluster has no room for it",
        "ObjectLostError": "its machine is gone",
        "OwnerDiedError": "its machine is gone",
    }
    return known.get(type(error).__name__, f"Ray says {type(error).__name__}")


def environment() -> dict[str, str]:
    """Environment variables that an actor's process shares with this one."""
    kept = {k: v for k, v in os.environ.items() if k.startswith((*PREFIXES, "MUJOCO"))}
    # Code that is not installed is imported from the same folders.
    installed = (sys.prefix, sys.base_prefix)
    paths = [path for path in sys.path if path and not path.startswith(installed)]
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": os.pathsep.join(paths)}


def connect(address: str, cpus: int, store_bytes: int) -> bool:
    """Connect to the cluster, or start one here; False if Ray was connected already."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        check_address(sys.modules["ray"].get_runtime_context().gcs_address)
        return False
    os.environ.setdefault(HEAD_SECONDS, "3600")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        _stay_home()
        options |= {
            "_node_ip_address": LOOPBACK,
            "include_dashboard": False,
            "num_cpus": cpus,
            "object_store_memory": max(LEAST_STORE, store_bytes),
        }
    elif check_address(find_address(address)):
        os.environ.setdefault(LOOPBACK_ONLY, "0")
    import ray

    try:
        ray.init(address, **options)
    except Exception as error:  # Ray raises plain ones too
        what = "No Ray cluster could be started" if address == "local" else "The Ray cluster"
        at = "" if address == "local" else f" at {address} cannot be used"
        raise EtudeError(f"{what}{at}: {_words(error)}") from error
    try:
        # Ray finds a cluster by itself, which may differ from the one that was checked above.
        at_home = check_address(ray.get_runtime_context().gcs_address)
        if address == "local" and not at_home:
            raise UsageError(
                f"Ray would listen beyond this machine: set {LOOPBACK_ONLY}=0 before anything "
                "imports ray."
            )
    except UsageError:
        ray.shutdown()
        raise
    return True


def _stay_home() -> None:
    """Configure a cluster that this run starts; Ray reads the settings when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray's workers have a low priority, and the learner waits for them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault(HEALTH_CHECKS, "1200")  # an hour: the run itself watches its one machine
    if "ray" not in sys.modules:
        os.environ[LOOPBACK_ONLY] = "0"
        if "RAY_AUTH_MODE" not in os.environ:
            # A token of this run, never on disk, keeps out other users of the machine.
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def find_address(address: str) -> str:
    """Resolve an address to host:port."""
    if address.startswith("ray://"):
        raise UsageError(
            f"{address} is a Ray Client address, and a run must be part of the cluster: start it "
            "on one of its machines with --collector.address auto."
        )
    if address != "auto":
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder) / "ray" / "ray_current_cluster"
    found = os.environ.get("RAY_ADDRESS") or (file.read_text() if file.exists() else "")
    if not found.strip():
        raise UsageError(
            "No Ray cluster runs on this machine: start one with `ray start --head`, or use "
            "--collector.address local."
        )
    return found.strip()


def check_address(address: str) -> bool:
    """Raise an error for a cluster without a token, except on loopback with RAY_AUTH_MODE=disabled
    (a machine without other users). Returns whether it is on the loopback address."""
    at_home, mode = is_loopback(split(address)[0]), os.environ.get("RAY_AUTH_MODE", "").lower()
    if at_home and mode == "disabled":
        return True
    if mode != "token" or is_open(split(address), LOOK_SECONDS):
        alone = ", or RAY_AUTH_MODE=disabled on a machine without other users" if at_home else ""
        raise UsageError(
            f"The Ray cluster at {address} is open to anyone who can reach it: start Ray and this "
            f"command with RAY_AUTH_MODE=token{alone} (see docs/cluster.md)."
        )
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" not in os.environ and file.exists():
        known = file.stat()
        if known.st_uid == os.getuid() and known.st_mode & 0o077:
            raise UsageError(f"Others can read the Ray token in {file}: `chmod 600 {file}`.")
    return at_home


def answers(address: tuple[str, int], seconds: float) -> bool:
    """Whether a server of Ray is alive: an ended one refuses, a frozen one does not answer."""
    return _call(address, seconds) not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def is_open(address: tuple[str, int], seconds: float) -> bool:
    """Whether the head of a cluster serves a client without a token."""
    return _call(address, seconds) == "OK"


def _call(address: tuple[str, int], seconds: float) -> str:
    """The status of a gRPC call without a token. Ray's own client may wait forever for an answer,
    and cannot tell whether a cluster accepts clients without a token."""
    import grpc

    # Without these, calls use a proxy, and wait for earlier ones.
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(_joined(*address), options) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=seconds)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def split(address: str) -> tuple[str, int]:
    """(host, port) of host:port; port 0 if it has none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else (address, 0)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def end_of(socket_file: str) -> select.poll | None:
    """A poll of the process behind a socket file: `poll(0)` is [] while it is alive. None if the
    operating system does not identify the process."""
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


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
