"""`etude data view`: answers of the page, statistics, filters, marks, and the page in a browser."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import chromium
from etude.api import train
from etude.cli.main import main as cli
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.limited import Limits
from etude.core.local_web import PageServer
from etude.data import editing
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.data.store.labels import Labels
from etude.data.store.manifest import open_episodes
from etude.evaluate.viewer import statistics as spreads
from etude.evaluate.viewer.serving import Viewer
from etude.evaluate.viewer.sources import Source, open_sources
from etude.evaluate.viewer.statistics import spread, statistics
from etude.planning import recipes
from etude.runs.files import Disk
from sockets import descendants, listening
from toys import tiny_bc, tiny_reach

LEROBOT = Path(__file__).parents[1] / "data" / "lerobot_files"
HOSTILE = '<img src=x onerror="document.title=1"></script><script>document.title=2</script>&amp;"\''
SENTENCES = ("lift the bowl", HOSTILE, "push the book")


def pictures_dataset(path: Path, episodes: int = 6) -> Path:
    """Episodes of 3 + number steps with a picture of one colour, joints, and sentences."""
    action = ActionSpec("box", (-1.0, -1.0), (1.0, 1.0))
    seen = {"camera": ArraySpec((8, 10, 3), "uint8"), "joints": ArraySpec((3,))}
    geometry = StoreGeometry(store_specs(EnvSpec(seen, action, 100)), 1, 100)
    store, rng, labels = (
        EpisodeStore.create(path, geometry, Disk()),
        np.random.default_rng(0),
        Labels(),
    )
    for number in range(episodes):
        steps = 3 + number
        camera = np.empty((steps + 1, 8, 10, 3), np.uint8)
        camera[:] = (number, 0, 200)
        camera[..., 1] = np.arange(steps + 1)[:, None, None]
        obs = {"camera": camera, "joints": rng.normal(size=(steps + 1, 3)).astype(np.float32)}
        actions = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
        rewards = np.eye(steps, dtype=np.float32)[-1] * number
        store.append_episode(obs, actions, rewards, True)
        success = (True, False, None)[number % 3]
        labels.add(f"take {number}", "whole", None, success, True, SENTENCES[number % 3])
    store.seal(labels).close()
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return pictures_dataset(tmp_path / "takes")


def viewer_of(path: Path) -> Viewer:
    return Viewer(path.name, open_sources(path, None, Limits()))


@pytest.fixture
def url(dataset: Path) -> Iterator[str]:
    viewer = viewer_of(dataset)
    with PageServer(viewer.get, viewer.send, None) as server:
        yield server.url


def ask(viewer: Viewer, path: str, **query: Any) -> Any:
    answer = viewer.get(f"/{path}", {name: str(value) for name, value in query.items()})
    assert answer.status == 200
    return json.loads(answer.body) if answer.kind == "application/json" else answer


WITHOUT_TORCH = """
import sys
from etude.cli.main import main
from etude.core.limited import Limits
from etude.evaluate.viewer.serving import Viewer
from etude.evaluate.viewer.sources import open_sources
from pathlib import Path
path = sys.argv[1]
assert main(["data", "inspect", path]) == main(["data", "exclude", path, "1"]) == 0
viewer = Viewer("takes", open_sources(Path(path), None, Limits()))
for asked in ("/episodes", "/episode", "/picture", "/statistics"):
    query = {"source": "0", "number": "0", "step": "1", "name": "camera"}
    assert viewer.get(asked, query).status == 200
print([name for name in ("torch", "mujoco", "gymnasium") if name in sys.modules])
"""


def test_datasets_are_shown_without_loading_torch(dataset: Path) -> None:
    """It takes longer than all else that a page of episodes waits for."""
    command = [sys.executable, "-c", WITHOUT_TORCH, str(dataset)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def numbers_of(found: Any) -> list[int]:
    return [row["number"] for row in found["rows"]]


# Statistics.


def test_statistics_are_those_of_numpy(dataset: Path) -> None:
    editing.exclude(dataset, [2])
    (source,) = open_sources(dataset, None, Limits())
    found, data = statistics(source), open_episodes(dataset)
    everything = [data.episode(number)[0] for number in range(data.num_episodes)]
    assert (found["episodes"], found["excluded"]) == (5, 1)
    assert found["read"] == f"all {data.num_transitions} steps"
    assert found["successes"] == {"yes": 2, "no": 2, "unknown": 1}
    assert dict(found["tasks"]) == {SENTENCES[0]: 2, HOSTILE: 2, SENTENCES[2]: 1}
    for name, values in (("lengths", data.lengths), ("returns", data.returns)):
        shown = found[name]
        assert shown["mean"] == pytest.approx(values.mean())
        assert shown["std"] == pytest.approx(values.std())
        assert (shown["min"], shown["max"]) == (values.min(), values.max())
        assert sum(shown["counts"]) == 5
    fields = {field["name"]: field["dims"] for field in found["fields"]}
    assert [*fields] == ["actions", "rewards", "obs/joints"]
    joined = {
        "actions": np.concatenate([steps.actions for steps in everything]),
        "rewards": np.concatenate([steps.rewards for steps in everything])[:, None],
        "obs/joints": np.concatenate([steps.obs["joints"] for steps in everything]),
    }
    for name, values in joined.items():
        assert len(fields[name]) == values.shape[1]
        for dim, column in zip(fields[name], values.T.astype(np.float64), strict=True):
            assert dim["mean"] == pytest.approx(column.mean())
            assert dim["std"] == pytest.approx(column.std())
            assert dim["median"] == pytest.approx(np.median(column))
            assert (dim["min"], dim["max"]) == (column.min(), column.max())
            assert sum(dim["counts"]) == len(column)
    counts, _ = np.histogram(joined["actions"][:, 1].astype(np.float64), 30)
    assert fields["actions"][1]["counts"] == counts.tolist()


def test_a_sample_says_that_it_is_one(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = open_sources(dataset, None, Limits())
    monkeypatch.setattr(spreads, "MAX_STEPS", 10)
    found = statistics(source)
    assert found["read"].startswith("10 steps of ")
    assert found["read"].endswith(" episodes drawn at random")
    assert {dim["count"] for field in found["fields"] for dim in field["dims"]} == {10}
    assert found["lengths"]["count"] == 6  # lengths are of all of them
    monkeypatch.setattr(spreads, "SECONDS", 0.0)
    assert statistics(source)["read"].endswith(" steps of 1 episodes drawn at random")


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([], None),
        ([2.5] * 4, [4]),
        ([3, 3, 5], [2, 0, 1]),
        ([np.nan, 1.0, np.inf, 1.0], [2]),
        ([1.0, np.nextafter(1.0, 2.0)], [2]),
        ([-1.7e308, 1.7e308], [1, *[0] * 28, 1]),
    ],
)
def test_a_spread_of_anything(values: list[float], counts: list[int] | None) -> None:
    found = spread(np.array(values))
    assert found.get("counts") == counts
    assert found["count"] == (0 if counts is None else sum(counts))
    json.dumps(found, allow_nan=False)


# Answers.


def test_filters_are_those_of_the_command(dataset: Path, tmp_path: Path) -> None:
    viewer = viewer_of(dataset)
    assert numbers_of(ask(viewer, "episodes", source=0)) == [0, 1, 2, 3, 4, 5]
    assert numbers_of(ask(viewer, "episodes", source=0, success="unknown")) == [2, 5]
    assert numbers_of(ask(viewer, "episodes", source=0, min_steps=4, max_steps=6)) == [1, 2, 3]
    assert numbers_of(ask(viewer, "episodes", source=0, max_return=1.5)) == [0, 1]
    assert numbers_of(ask(viewer, "episodes", source=0, task="onerror")) == [1, 4]
    found = ask(viewer, "episodes", source=0, success="yes", min_steps=4, task="the bowl")
    assert numbers_of(found) == [3]
    assert (found["count"], found["steps"]) == (1, 6)
    command = found["command"].replace("OUT", str(tmp_path / "out"))
    assert cli(shlex.split(command)[1:]) == 0
    assert open_episodes(tmp_path / "out").labels.names == ["take 3"]
    with pytest.raises(UsageError, match="'many' is not a number"):
        ask(viewer, "episodes", source=0, min_steps="many")


def test_an_episode_and_its_pictures(dataset: Path) -> None:
    viewer, data = viewer_of(dataset), open_episodes(dataset)
    found = ask(viewer, "episode", source=0, number=4)
    assert (found["name"], found["task"], found["success"]) == ("take 4", HOSTILE, False)
    assert (found["steps"], found["return"], found["pictures"]) == (7, 4.0, ["camera"])
    curves = {curve["name"]: curve["lines"] for curve in found["curves"]}
    steps = data.episode(4)[0]
    assert np.allclose(np.array(curves["actions"]).T, steps.actions, rtol=1e-5)
    assert np.allclose(np.array(curves["joints"]).T, steps.obs["joints"], rtol=1e-5)
    picture = ask(viewer, "picture", source=0, number=4, step=5, name="camera")
    pixels = np.asarray(Image.open(io.BytesIO(picture.body)))
    assert np.array_equal(pixels, steps.obs["camera"][5])
    for wrong in ({"number": 6}, {"number": -1}, {"number": "0x1"}, {"number": ""}):
        with pytest.raises(UsageError):
            ask(viewer, "episode", source=0, **wrong)
    for wrong in ({"step": 7}, {"name": "../camera"}, {"name": "joints"}):
        with pytest.raises(UsageError):
            ask(
                viewer, "picture", **{"source": 0, "number": 4, "step": 1, "name": "camera"} | wrong
            )


def test_long_episodes_are_thinned(tmp_path: Path) -> None:
    class Long(Source):
        """One episode of ten million steps, that counts what is read."""

        specs = {"actions": ArraySpec((2,)), "rewards": ArraySpec(())}  # noqa: RUF012
        read = 0

        def columns(self, number: int, names: Any, offsets: Any) -> Any:
            self.read += len(offsets)
            steps = {"actions": np.stack([offsets, offsets], 1) * np.nan, "rewards": offsets * 1.0}
            return {name: steps[name] for name in names}

    table = np.zeros(1, [("length", "<i8"), ("return", "<f8")])
    table["length"] = 10_000_000
    source = Long("long", table, Labels.unknown(1))
    found = ask(Viewer("long", [source]), "episode", source=0, number=0)
    assert source.read == 1500
    assert found["stride"] == 6667
    assert found["curves"][1]["lines"][0][-1] == pytest.approx(6667 * 1499, rel=1e-5)
    assert set(found["curves"][0]["lines"][0]) == {None}  # NaN is not JSON
    source.labels.rewarded[0] = False
    found = ask(Viewer("long", [source]), "episode", source=0, number=0)
    assert [curve["name"] for curve in found["curves"]] == ["actions"], "the zeros are no rewards"


def test_marks_and_their_undoing(dataset: Path) -> None:
    viewer, before = viewer_of(dataset), open_episodes(dataset).seal_sha256
    assert ask(viewer, "statistics", source=0)["episodes"] == 6
    assert viewer.send({"source": 0, "episodes": [1, 4]}) == {"excluded": [1, 4]}
    assert ask(viewer, "statistics", source=0)["episodes"] == 4
    assert numbers_of(ask(viewer, "episodes", source=0, excluded="yes")) == [1, 4]
    assert numbers_of(ask(viewer, "episodes", source=0, excluded="no")) == [0, 2, 3, 5]
    assert open_episodes(dataset).num_episodes == 4
    assert ask(viewer_of(dataset), "about")["sources"][0]["excluded"] == [1, 4]
    assert viewer.send({"source": 0, "episodes": [1, 4], "undo": True}) == {"excluded": []}
    assert open_episodes(dataset).seal_sha256 == before
    for wrong in (None, [], {"episodes": "1"}, {"source": 0, "episodes": ["x"]}, {"episodes": [1]}):
        with pytest.raises(UsageError):
            viewer.send(wrong)


# The server.


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_the_printed_address_is_answered(url: str) -> None:
    root, token = url.rstrip("/").rsplit("/", 1)
    assert status_of(url) == 200
    assert status_of(f"{url}about") == 200
    assert status_of(f"{url}about", Host="localhost:9", Origin="http://localhost:9") == 200
    assert status_of(f"{root}/about") == 403
    assert status_of(f"{root}/{token[:-1]}x/about") == 403
    assert status_of(f"{url}about", Host="example.com") == 403
    assert status_of(f"{url}about", Origin="http://example.com") == 403
    assert status_of(f"{url}../../etc/passwd") in (403, 404)
    assert status_of(f"{url}nothing") == 404
    assert status_of(f"{url}episode?source=0&number=99") == 400
    with urllib.request.urlopen(url) as page:
        policy = page.headers["Content-Security-Policy"]
        assert page.headers["X-Frame-Options"] == "DENY"
        assert page.headers["Access-Control-Allow-Origin"] is None
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert listening({os.getpid()})["beyond"] == set()


def test_only_the_page_marks(url: str, dataset: Path) -> None:
    address, (root, _) = url.replace("http", "ws"), url.rstrip("/").rsplit("/", 1)
    with pytest.raises(InvalidStatus):
        connect(f"{address}edits", origin="http://example.com")  # type: ignore[arg-type]
    with pytest.raises(InvalidStatus):
        connect(f"{root.replace('http', 'ws')}/edits", origin=root)  # type: ignore[arg-type]
    assert status_of(f"{url}edits?source=0&episodes=1") == 404  # no path changes anything
    with connect(f"{address}edits", origin=root) as page:  # type: ignore[arg-type]
        page.send(json.dumps({"source": 0, "episodes": [3]}))
        assert json.loads(page.recv(timeout=60)) == {"excluded": [3]}
        for message in ("{", "[" * 100_000, json.dumps({"source": 0, "episodes": [99]})):
            page.send(message)
            assert "error" in json.loads(page.recv(timeout=60))
    assert open_episodes(dataset).num_episodes == 5


# Other systems' files, and runs.


@pytest.mark.parametrize("pictures", [pytest.param("image", marks=pytest.mark.rotated), "video"])
def test_files_of_other_systems_need_no_import(pictures: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    path = LEROBOT / pictures
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    viewer = viewer_of(path)
    assert cli(["data", "import", str(path), str(tmp_path / "made")]) == 0
    made = viewer_of(tmp_path / "made")
    shown, imported = (ask(each, "episodes", source=0) for each in (viewer, made))
    assert shown["rows"] == imported["rows"]
    for number in range(shown["count"]):
        query = {"source": 0, "number": number}
        assert ask(viewer, "episode", **query) == ask(made, "episode", **query)
        query |= {"name": "top", "step": 2}
        assert ask(viewer, "picture", **query) == ask(made, "picture", **query)
    assert ask(viewer, "statistics", source=0) == ask(made, "statistics", source=0)
    with pytest.raises(UsageError, match=f"etude data import {path} DATASET"):
        viewer.send({"source": 0, "episodes": [0]})
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_a_run_shows_its_evaluations_and_its_dataset(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_reach(1), run)
    with pytest.raises(UsageError, match="has recorded no episodes"):
        viewer_of(run)
    assert cli(["eval", str(run), "--episodes", "4"]) == 0
    viewer = viewer_of(run)
    (about,) = ask(viewer, "about")["sources"]
    assert about["name"].startswith("evaluation ")
    assert about["name"].endswith("-fresh")
    found = ask(viewer, "episode", source=0, number=0)
    assert found["curves"] == []
    assert "reward/progress" in found["numbers"]
    rows = ask(viewer, "episodes", source=0)["rows"]
    assert ask(viewer, "statistics", source=0)["returns"]["mean"] == pytest.approx(
        np.mean([row["return"] for row in rows])
    )
    with pytest.raises(UsageError, match="keeps the results"):
        viewer.send({"source": 0, "episodes": [0]})
    cloned = tmp_path / "cloned"
    train(tiny_bc(tmp_path, "act", 1, 1, "never"), cloned)
    assert ask(viewer_of(cloned), "about")["sources"][-1]["name"] == "dataset data"


@pytest.mark.rotated
def test_a_run_shows_its_replay_as_it_was_saved(tmp_path: Path) -> None:
    recipe = recipes.find("sac").replace(env__id="Pendulum-v1", clock__total_timesteps=1000)
    train(recipe, tmp_path / "run")
    files = {file: file.read_bytes() for file in (tmp_path / "run" / "replay").rglob("*.*")}
    viewer = viewer_of(tmp_path / "run")
    about = ask(viewer, "about")["sources"][0]
    assert about["name"].startswith("replay at step 1,000")
    row = ask(viewer, "episodes", source=0)["rows"][0]
    found = ask(viewer, "episode", source=0, number=0)
    rewards = next(curve for curve in found["curves"] if curve["name"] == "rewards")
    assert sum(rewards["lines"][0]) == pytest.approx(row["return"], rel=1e-4)
    assert {file: file.read_bytes() for file in files} == files


def test_what_cannot_be_viewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["data", "view", str(tmp_path / "nothing")]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err
    assert cli(["data", "view", str(tmp_path)]) == 1
    assert "is in none of the formats" in capsys.readouterr().err


# The browser.


@pytest.mark.rotated
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    if chromium.find() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    dataset = pictures_dataset(tmp_path / "takes")
    command = [sys.executable, "-m", "etude", "data", "view", str(dataset)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        assert listening(descendants(process.pid))["beyond"] == set()
        with chromium.Browser(tmp_path / "profile") as browser:
            browser.open(f"{url}#episode=1")
            look_at_the_page(browser, dataset)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert process.stdout.read() == "Stopped.\n"
    finally:
        process.kill()
        process.wait()


def look_at_the_page(browser: chromium.Browser, dataset: Path) -> None:
    text = "document.querySelector('{}').textContent".format
    ready = "document.querySelector('#pictures img')?.naturalWidth === 10"
    browser.wait(f"{ready} && {text('#head')}.includes('Episode 1')")
    # A hostile sentence is text, in the list and above the pictures.
    assert browser.run(text("#head .task")) == HOSTILE
    assert browser.run("document.querySelectorAll('.row .task')[1].textContent") == HOSTILE
    assert browser.run("document.title") == "takes"
    assert browser.run("document.querySelectorAll('#list img, #head img, body script').length") == 1
    assert browser.run("document.querySelectorAll('.curve').length") == 3
    # Keys move through time and episodes.
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run(text("#step")) == "step 2 of 3"
    browser.wait("document.querySelector('#pictures img').src.endsWith('step=2')")
    browser.press("ArrowDown")
    browser.wait(f"{text('#head')}.includes('Episode 2')")
    browser.press(" ")
    browser.wait(f"{text('#step')} === 'step 4 of 4'")  # played to its end
    # A mark, and its undoing, by the key and by the button.
    browser.press("x")
    browser.wait("document.querySelector('.row.excluded')?.dataset.number === '2'")
    assert open_episodes(dataset).num_episodes == 5
    browser.run("document.querySelector('#exclude').click()")
    browser.wait("!document.querySelector('.row.excluded')")
    assert open_episodes(dataset).num_episodes == 6
    # Filters and statistics.
    browser.run("document.querySelector('[name=success]').value = 'yes'")
    browser.run("document.querySelector('#filter').dispatchEvent(new Event('input'))")
    browser.wait("document.querySelectorAll('.row').length === 2")
    browser.run("document.querySelector('#tab-statistics').click()")
    browser.wait("document.querySelectorAll('#statistics .histogram').length === 2 + 2 + 1 + 3")
    for width in (1400, 420):
        browser.resize(width, 900)
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelector('#error').hidden")
