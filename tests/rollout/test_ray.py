"""The Ray collector on real clusters, all of them on 127.0.0.1: the same bits, whatever dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import short_recipes

from ray_nodes import actors_of, node, start  # isort: skip
import ray_moods

pytest.importorskip("ray")

from etude.api import Interrupted, Run, resume, train
from etude.core.contracts import Broadcast, Fragment
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.segments import BufferSpec
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.rollout import ray as on_ray_module
from etude.rollout.elastic import ElasticCollector, NoWorkers
from etude.rollout.host import Blueprint, Host
from etude.rollout.placement import Placement
from etude.rollout.ray import RayFleet, answers, check_address, find_address, is_open
from etude.rollout.schedule import Schedule
from etude.training.loop import Callback, Context
from run_hash import run_hash
from sockets import descendants, listening
from toy_envs import IndividualEnv, ToyEnv
from toys import changed, tiny_motions, toy_buffer, toy_policy

LSTM = changed(short_recipes.find("reach-at-scale-short"), clock={"total_timesteps": 8 * 2_048})
"""LSTM, priorities, two shards, and the next iteration collected while this one trains."""
RRD = short_recipes.find("episodic-short")
"""SAC, its replay, and learned rewards."""
MOTIONS = tiny_motions().model_copy(update={"name": "motions"})
"""A curriculum over motions, whose weights change with every iteration."""
WALK = short_recipes.find("walk-go1-short")
"""A randomised task on rough ground, with a curriculum over its levels."""
ROTATED = pytest.mark.rotated


def named(value: Any) -> str | None:
    return getattr(value, "name", None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node with room for four actors; tests add and remove others."""
    made = start(4)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], dict[str, str]]:
    """What a recipe gives on one thread of this process."""
    known: dict[str, dict[str, str]] = {}

    def of(recipe: Recipe) -> dict[str, str]:
        if recipe.name not in known:
            alone = changed(recipe, collector={"threads": 1})
            known[recipe.name] = hashes(train(alone, tmp_path_factory.mktemp("untouched") / "run"))
        return known[recipe.name]

    return of


def hashes(run: Run) -> dict[str, str]:
    return {**run_hash(run.path), **run.fingerprint()}


def on_ray(recipe: Recipe, cluster: Any, actors: int | None, **options: Any) -> Recipe:
    placed = {"kind": "ray", "threads": 1, "actors": actors, "address": cluster.address}
    return changed(recipe, collector={**placed, **options})


class Strikes(Callback):
    """Does something terrible in the middle of given iterations."""

    def __init__(self, strikes: dict[int, Callable[[], None]]) -> None:
        self.strikes, self.done = strikes, 0

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        strike = self.strikes.get(context.clock.now.iterations)
        if strike is not None:
            threading.Timer(0.02, self.strike, [strike]).start()

    def strike(self, strike: Callable[[], None]) -> None:
        strike()
        self.done += 1


def hit(cluster: Any, number: int) -> None:
    """A signal to one of the actors, as soon as there is one."""
    while not (found := actors_of(cluster)):
        time.sleep(0.01)
    os.kill(found[0], number)


@pytest.mark.rotated
def test_threads_do_not_matter_either(untouched: Any, tmp_path: Path) -> None:
    recipe = changed(LSTM, collector={"threads": 4})
    assert hashes(train(recipe, tmp_path / "run")) == untouched(LSTM)


@pytest.mark.parametrize(
    ("recipe", "actors"),
    [
        pytest.param(LSTM, 1, marks=ROTATED),
        pytest.param(LSTM, 2, marks=ROTATED),
        pytest.param(LSTM, 4, marks=ROTATED),
        pytest.param(RRD, 1, marks=ROTATED),
        pytest.param(RRD, 2, marks=pytest.mark.slow),
        pytest.param(RRD, 4, marks=ROTATED),
        pytest.param(MOTIONS, 2, marks=ROTATED),
        pytest.param(WALK, 2, marks=ROTATED),
    ],
    ids=named,
)
def test_actors_change_nothing(
    recipe: Recipe, actors: int, cluster: Any, untouched: Any, tmp_path: Path
) -> None:
    run = train(on_ray(recipe, cluster, actors), tmp_path / "run")
    assert hashes(run) == untouched(recipe)
    last = run.rows()[-1]
    assert last["system/workers"] == actors
    assert last["system/restarts"] == 0.0
    assert last["time/transport"] > 0.0


@pytest.mark.rotated
@pytest.mark.parametrize("recipe", [LSTM, RRD], ids=named)
def test_killed_and_frozen_actors_change_nothing(
    recipe: Recipe, cluster: Any, untouched: Any, tmp_path: Path
) -> None:
    kill, stop = (partial(hit, cluster, number) for number in (signal.SIGKILL, signal.SIGSTOP))
    strikes, said = Strikes({1: kill, 3: stop, 4: kill, 6: kill}), []
    run = train(
        on_ray(recipe, cluster, 2, deadline=2.0),
        tmp_path / "run",
        callbacks=[strikes],
        say=said.append,
    )
    assert hashes(run) == untouched(recipe)
    assert strikes.done == 4
    assert sum("its process ended" in text for text in said) >= 1
    assert any("go to others" in text or "goes to others" in text for text in said)


@pytest.mark.rotated
def test_a_node_that_is_removed_changes_nothing(
    cluster: Any, untouched: Any, tmp_path: Path
) -> None:
    second, said = cluster.add_node(**node(1)), []
    strikes = Strikes({3: lambda: cluster.remove_node(second)})
    recipe = on_ray(LSTM, cluster, None)  # one actor per machine
    run = train(recipe, tmp_path / "run", callbacks=[strikes], say=said.append)
    assert hashes(run) == untouched(LSTM)
    assert strikes.done == 1
    assert any(text.startswith("Collecting 4 groups on 2 workers") for text in said)
    assert run.rows()[-1]["system/workers"] == 1.0
    assert run.rows()[-1]["system/restarts"] == 1.0


@pytest.mark.rotated
def test_bad_moments_of_actors_change_nothing(
    cluster: Any, untouched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that pass, one ten times slower, and a broadcast that cannot be fetched."""
    monkeypatch.chdir(tmp_path)
    moments = {1: "slow", 2: "fetch", 3: "raise", 5: "step"}
    strikes = Strikes({n: partial(ray_moods.put, kind) for n, kind in moments.items()})
    said: list[str] = []
    with ray_moods.moody():
        run = train(
            on_ray(LSTM, cluster, 2), tmp_path / "run", callbacks=[strikes], say=said.append
        )
    assert hashes(run) == untouched(LSTM)
    assert strikes.done == 4
    assert ray_moods.left() == []
    told = "\n".join(said)
    assert "a strange moment; its group" in told
    assert "RuntimeError: the simulator lost its mind" in told
    assert "owner" not in told  # A broadcast that is handed out anew is nobody's fault.
    assert "is slow; its group" in told
    assert "which worker" in told  # did what another failed at, which was replaced


@pytest.mark.rotated
def test_a_run_moves_to_a_cluster_when_it_is_resumed(
    cluster: Any, untouched: Any, tmp_path: Path
) -> None:
    stop = Strikes({4: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    with pytest.raises(Interrupted):
        train(LSTM, tmp_path / "run", callbacks=[stop])
    placement = Placement(kind="ray", actors=1, address=cluster.address)
    assert hashes(resume(tmp_path / "run", collector=placement)) == untouched(LSTM)


def individual(cluster: Any, allow_inexact: bool) -> tuple[ElasticCollector, list[str]]:
    env, said = IndividualEnv(2), []
    part = BufferSpec(env.spec, {}, 2, 4, 1)
    blueprint = Blueprint(partial(IndividualEnv, 2), partial(toy_policy, env), part, Key(0), 1)
    fleet = RayFleet(blueprint, 1, cluster.address, 0)
    views = [[toy_buffer(env.spec, 2, 4).part(slice(0, 2))]]
    host = Host(blueprint)
    made = ElasticCollector(fleet, Schedule(1), views, host.probe, allow_inexact, host.close)
    made.report_to(said.append, lambda reason: said.append(f"marked: {reason}"))
    return made, said


@pytest.mark.rotated
@pytest.mark.parametrize("allow_inexact", [False, True])
def test_an_actor_with_other_bits_is_refused_or_marks_the_run(
    allow_inexact: bool, cluster: Any
) -> None:
    collector, said = individual(cluster, allow_inexact)
    weights = Broadcast(0, dict(toy_policy(ToyEnv(2)).state_dict()))
    try:
        if allow_inexact:
            (fragment,) = collector.collect(weights, 0)
            assert fragment.rewards[0, 0] != os.getpid()
            assert said[0].startswith("marked: worker 0 (pid ")
        else:
            with pytest.raises(
                NoWorkers, match="computes different bits than this process: its CPU"
            ):
                collector.collect(weights, 0)
            assert said[0].startswith("Refused: worker 0 (pid ")
    finally:
        collector.close()


@pytest.mark.parametrize(
    ("address", "mode", "open_to_all"),
    [
        ("127.0.0.1:6379", "", True),
        ("127.0.0.1:6379", "disabled", False),
        ("localhost:6379", "disabled", False),
        ("[::1]:6379", "disabled", False),
        ("[::1]:6379", "token", False),
        ("10.0.0.5:6379", "", True),
        ("10.0.0.5:6379", "disabled", True),
        ("head.example:6379", "", True),
        ("10.0.0.5:6379", "token", False),
    ],
)
def test_a_cluster_must_ask_for_a_token(
    address: str, mode: str, open_to_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other people may be on this machine too; who is alone may say so."""
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(on_ray_module, "is_open", lambda address, seconds: False)
    if open_to_all:
        with pytest.raises(UsageError, match="RAY_AUTH_MODE=token"):
            check_address(address)
    else:
        check_address(address)
    # A token in the environment of the run alone is no use: Ray lets in who needs none.
    monkeypatch.setattr(on_ray_module, "is_open", lambda address, seconds: True)
    if mode == "token":
        with pytest.raises(UsageError, match="is open to anyone who can reach it"):
            check_address(address)


def test_a_token_that_others_can_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("0" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(on_ray_module, "is_open", lambda address, seconds: False)
    check_address("127.0.0.1:6379")  # This one is in the environment.
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    file.chmod(0o640)
    with pytest.raises(UsageError, match=r"Others can read the Ray token .*chmod 600"):
        check_address("127.0.0.1:6379")
    file.chmod(0o600)
    check_address("127.0.0.1:6379")


class Everything(grpc.GenericRpcHandler):
    """A server that does whatever it is asked."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@pytest.mark.rotated
def test_what_a_stranger_is_told(cluster: Any) -> None:
    host, _, port = cluster.address.rpartition(":")
    assert answers((host, int(port)), 5.0)
    assert not is_open((host, int(port)), 5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It listens, and says nothing.
        at = silent.getsockname()[:2]
        assert not answers(at, 0.05)
        assert not is_open(at, 0.05)
    server = grpc.server(ThreadPoolExecutor(1), [Everything()])
    at = ("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    server.start()
    assert answers(at, 5.0)
    assert is_open(at, 5.0)
    server.stop(None).wait()
    assert not answers(at, 1.0)  # It is gone.


@pytest.mark.rotated
def test_the_cluster_of_this_machine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="`ray start --head`"):
        find_address("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.5:6379\n")
    assert find_address("auto") == "10.0.0.5:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:6379")
    assert find_address("auto") == "10.0.0.6:6379"
    with pytest.raises(UsageError, match="Ray Client"):
        find_address("ray://10.0.0.6:10001")


@pytest.mark.rotated
def test_an_open_cluster_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    recipe = changed(LSTM, collector={"kind": "ray", "address": "10.0.0.5:6379"})
    with pytest.raises(UsageError, match="open to anyone who can reach it"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def struck(
    folder: Path, what: str, number: int, seconds: float, pause: float = 0.0, **ray: str
) -> subprocess.Popen[str]:
    """A run on a cluster of its own, with settings `ray`, one of whose processes gets a signal."""
    recipe = changed(LSTM, collector={"kind": "ray", "threads": 1, "actors": 1})
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    driver = Path(__file__).parents[1] / "lib" / "head_driver.py"
    arguments = [folder / "recipe.yaml", folder / "run", what, int(number), seconds, pause]
    return subprocess.Popen(
        [sys.executable, "-u", str(driver), *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | ray,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("what", "number", "seconds", "pause", "said"),
    [
        # The head is asked once a second, and what is left of the run takes less.
        ("gcs_server", signal.SIGSTOP, 2.0, 1.5, "has not answered for 2 s: it was ended, "),
        # Ray ends a process whose raylet is gone when the head has found out, here after 1 s.
        pytest.param(
            "raylet", signal.SIGKILL, 0.0, 5.0, "on this machine has ended.", marks=ROTATED
        ),
    ],
)
def test_a_lost_head_ends_in_a_sentence_a_report_and_a_run_that_goes_on(
    what: str,
    number: int,
    seconds: float,
    pause: float,
    said: str,
    untouched: Any,
    tmp_path: Path,
) -> None:
    process = struck(tmp_path, what, number, seconds, pause, RAY_health_check_period_ms="200")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert said in out
    (report,) = (tmp_path / "run" / "failures").iterdir()
    assert "HeadLost" in (report / "context.json").read_text()
    run = resume(tmp_path / "run", collector=Placement(kind="local"))
    assert hashes(run) == untouched(LSTM)


@pytest.mark.rotated
def test_signals_are_answered_while_a_head_is_waited_for(tmp_path: Path) -> None:
    process = struck(tmp_path, "gcs_server", signal.SIGSTOP, 60.0, 1.5)
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if "the run waits for it" in line:
            break
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert any("SIGTERM: the run is saved" in line for line in process.stdout)
    assert time.monotonic() - start < 10.0
    assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.rotated
def test_nothing_listens_beyond_loopback_while_a_cluster_of_its_own_trains(
    untouched: Any, tmp_path: Path
) -> None:
    """The command as a person types it, in an environment that knows nothing of Ray."""
    (tmp_path / "recipe.yaml").write_text(recipes.dump(LSTM))
    options = ["--collector", "ray", "--collector.actors", "1", "--evaluation.final-episodes", "0"]
    command = ["train", str(tmp_path / "recipe.yaml"), "--folder", str(tmp_path / "run"), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", *command],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    looks, processes = 0, {process.pid}
    try:
        while process.poll() is None:
            mine = descendants(process.pid)
            processes |= mine
            sockets = listening(mine)
            assert sockets["beyond"] == set()
            looks += len(sockets["loopback"]) >= 4  # gcs, raylet, driver and actor at least
            time.sleep(0.05)
    finally:
        process.kill()
        out, _ = process.communicate()
    assert looks >= 3, out
    assert "Collecting 4 groups on 1 worker on 1 machine." in out
    result = run_hash(tmp_path / "run")
    assert result.items() <= untouched(LSTM).items()
    patience = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]  # nobody is left behind
