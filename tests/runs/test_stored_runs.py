"""Runs in an object store: commits that are whole, one writer, nothing lost, no credentials."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude
from etude import api
from etude.cli.main import main
from etude.core.clock import ClockConfig
from etude.core.errors import EtudeError, UsageError
from etude.planning.resolve import resolve
from etude.runs import objects, stored
from etude.runs.documents import encode_sealed
from etude.runs.files import store_url
from etude.runs.objects import Changed, Objects, StoreFault
from etude.runs.stored import Index, StoredRun
from object_store import BUCKET, KEY, SECRET, Relay, Server, environment, serving

pytest.importorskip("obstore", reason="the extra `store` is not installed")
pytest.importorskip("moto", reason="the S3 server of the tests is not installed")

URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def _store(server: Server, tmp_path: Path) -> Iterator[None]:
    with environment(server.endpoint, tmp_path / "cache"):
        store = Objects(f"s3://{BUCKET}/runs")
        store.delete(store.names())
        yield


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """{path: bytes, target of a link, or None for a folder} of all that is published."""
    found: dict[str, bytes | str | None] = {}
    for path, entry in stored._tree(folder):
        is_file = entry is None
        found[path] = (folder / path).read_bytes() if is_file else (entry or {}).get("link")
    return found


def written(run: StoredRun, **texts: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (run.folder / name).write_text(text)


def begun(lease: float = 1.0, **texts: str) -> StoredRun:
    run = StoredRun.claim(URL, new=True, lease=lease)
    written(run, **texts)
    run.publish()
    return run


def silenced(run: StoredRun) -> StoredRun:
    """A writer that is frozen: it gives no sign of life, and looks at nothing."""
    run._ended.set()
    time.sleep(0.3)
    run._ended.clear()
    return run


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    run = begun(recipe="one")
    (run.folder / "checkpoints" / "000000000100").mkdir(parents=True)
    (run.folder / "evaluations").mkdir()
    (run.folder / "checkpoints" / "latest").symlink_to("000000000100")
    big = bytes(range(256)) * (3 * stored.PIECE // 256) + b"end"
    (run.folder / "checkpoints" / "000000000100" / "arrays").write_bytes(big)
    with (run.folder / "block.bin").open("wb") as stream:
        stream.truncate(5 * stored.PIECE)
        stream.seek(stored.PIECE + 5)
        stream.write(b"in the middle")
    (run.folder / ".lock").write_text("not published")
    run.publish()
    expected = contents(run.folder)
    run.close()
    shutil.rmtree(tmp_path / "cache")
    copy = stored.mirror(URL)
    assert contents(copy) == expected
    assert not (copy / ".lock").exists()
    assert os.stat(copy / "block.bin").st_blocks * 512 < 2 * stored.PIECE  # holes stay holes
    again = StoredRun.claim(URL)
    assert contents(again.folder) == expected
    again.close()


def test_only_what_is_new_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(kept="k" * 100_000)
    sent: list[int] = []
    put = Objects.put
    monkeypatch.setattr(
        Objects, "put", lambda self, name, data: (sent.append(len(data)), put(self, name, data))[1]
    )
    rows = run.folder / "metrics.jsonl"
    for number in range(60):
        with rows.open("a") as stream:
            stream.write(f"{number:999}\n")
        run.publish()
    sizes = [size for size in sent if size >= 1000]
    assert sum(sizes) < 8 * rows.stat().st_size  # joined now and then, never all of it each time
    assert max(sizes) <= rows.stat().st_size
    assert len(run._index.files["metrics.jsonl"]["pieces"]) <= stored._MOST_SHORT + 1
    names = set(Objects(URL).names("objects/"))
    assert {f"{name}" for name in names} == run._index.objects  # what is not named is deleted
    run.close()
    assert (stored.mirror(URL) / "metrics.jsonl").read_bytes() == rows.read_bytes()


def test_a_file_that_changes_at_once_is_seen() -> None:
    """Two writes within one tick leave the same times."""
    run = begun(block="a" * 1000)
    for letter in "bcdefgh":
        with (run.folder / "block").open("r+") as stream:
            stream.write(letter * 1000)
        os.utime(run.folder / "block", ns=(10**18, 10**18))
        run.publish()
        entry = run._index.files["block"]["pieces"]
        assert Objects(URL).get(entry[0][0]) == letter.encode() * 1000
    run.close()


def test_two_writers_at_once() -> None:
    begun(recipe="one").close()
    for _ in range(5):
        won: list[StoredRun] = []
        said: list[str] = []

        def claim(won: list[StoredRun] = won, said: list[str] = said) -> None:
            try:
                won.append(StoredRun.claim(URL))
            except UsageError as error:
                said.append(str(error))

        with Relay(os.environ["AWS_ENDPOINT_URL"]) as relay, environment(relay.endpoint):
            threads = [threading.Thread(target=claim) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for run in won:
                run.close()
        assert len(won) == 1
        assert all("is being written by process" in text for text in said)
        assert len(said) == 3


def test_a_writer_that_was_taken_over_commits_nothing() -> None:
    first = silenced(begun(recipe="one"))
    second = StoredRun.claim(URL)  # after the lease
    written(second, checkpoint="of the second")
    second.publish()
    written(first, checkpoint="of the first")
    with pytest.raises(EtudeError, match="took it over after"):
        first.publish()
    first.close()
    second.publish()
    expected = contents(second.folder)
    second.close()
    assert contents(stored.mirror(URL)) == expected
    assert expected["checkpoint"] == b"of the second"


def test_a_writer_hears_of_its_successor() -> None:
    first = begun(recipe="one", lease=1.0)
    found = stored.read_index(Objects(URL))
    assert found is not None
    mine = replace(found[0], epoch=9, serial=9, writer="x", holder="7 on other")
    Objects(URL).swap(stored.INDEX, mine.encode(), found[1])
    time.sleep(0.6)
    with pytest.raises(EtudeError, match="7 on other"):
        first.check()
    first.close()


def test_a_living_writer_stays() -> None:
    first = begun(recipe="one", lease=1.0)
    begin = time.monotonic()
    with pytest.raises(UsageError, match="is being written by process"):
        StoredRun.claim(URL)
    assert time.monotonic() - begin < 3.0
    first.close()
    with pytest.raises(UsageError, match="exists already and is never overwritten"):
        StoredRun.claim(URL, new=True)
    StoredRun.claim(URL).close()


def test_what_a_slow_writer_sweeps_is_not_its_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that sleeps between becoming one and deleting leftovers."""
    begun(recipe="one").close()
    with monkeypatch.context() as patched:
        patched.setattr(StoredRun, "_sweep", lambda self: None)
        slow = silenced(StoredRun.claim(URL))
    time.sleep(0.5)
    last = StoredRun.claim(URL)
    written(last, checkpoint="kept")
    last.publish()
    slow._sweep()
    last.close()
    assert (stored.mirror(URL) / "checkpoint").read_text() == "kept"


class Died(BaseException):
    pass


def die_at_request(patched: pytest.MonkeyPatch, last: int, after: bool) -> None:
    """Let this thread die at a request that changes the store: before it, or after."""
    left = [last]
    for name in ("put", "swap", "delete"):
        whole = getattr(Objects, name)

        def request(self: Objects, *given: object, whole: Any = whole) -> object:
            if threading.current_thread().name.startswith("alive"):
                return whole(self, *given)
            left[0] -= 1
            if left[0] < 0:
                if after and left[0] == -1:
                    whole(self, *given)
                raise Died
            return whole(self, *given)

        patched.setattr(Objects, name, request)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_any_request(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Whatever request of a save is the last one, and whether it arrives or not, the next writer
    finds the run as it was before or after it."""
    old = {"recipe": b"one", "checkpoint": b"first", "same": b"s" * 5000}
    new = {"recipe": b"one", "checkpoint": b"second", "same": b"s" * 5000, "more": b"m"}
    died = 0
    for last in range(20):
        store = Objects(URL)
        store.delete(store.names())
        run = begun(**{name: data.decode() for name, data in old.items()})
        with monkeypatch.context() as patched:
            die_at_request(patched, last, after)
            written(run, **{name: data.decode() for name, data in new.items()})
            try:
                run.publish()
            except Died:
                died += 1
            else:
                silenced(run)
                break
        silenced(run)
        found = stored.read_index(store)
        assert found is not None
        free = replace(found[0], serial=found[0].serial + 1, holder="")
        store.swap(stored.INDEX, free.encode(), found[1])  # spares the lease
        successor = StoredRun.claim(URL)
        there = contents(successor.folder)
        assert there in (old, new), last
        assert set(store.names("objects/")) == successor._index.objects  # leftovers are gone
        successor.close()
    assert died >= 3


@pytest.mark.parametrize("fault", ["lost answer", "doubled", "lost request", "refused", "late"])
def test_conditional_writes_whose_answers_are_lost(
    server: Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Relay(server.endpoint, latest=0.3) as relay, environment(relay.endpoint):
        faults = iter([fault, "", "", fault])
        monkeypatch.setattr(relay, "_chosen", lambda: (next(faults, ""), 0.2))
        store = Objects(f"s3://{BUCKET}/runs/two")
        first = store.swap("run.json", b"first", None)
        second = store.swap("run.json", b"second", first)
        time.sleep(0.5)
        assert store.get("run.json") == b"second"
        with pytest.raises(Changed):
            store.swap("run.json", b"third", first)
        with pytest.raises(Changed):
            store.swap("run.json", b"third", None)
        store.swap("run.json", b"third", second)


def tiny() -> etude.Recipe:
    recipe = etude.recipes.reach_short()
    return recipe.replace(
        clock=ClockConfig(total_timesteps=6 * 1024, cycles=1, iterations=1),
        collector__threads=1,
        evaluation__every="2 cycles",
        evaluation__final_episodes=0,
        checkpoint__every="1 iteration",
        checkpoint__lease=1.0,
    )


def test_a_run_resumes_on_another_machine(tmp_path: Path) -> None:
    """The local disk is deleted twice; nothing that is written anywhere has the credentials."""
    local = etude.train(tiny(), tmp_path / "local")
    said: list[str] = []
    api.create(resolve(tiny()), URL)
    for pause in (2, 4, None):
        shutil.rmtree(tmp_path / "cache")
        run = etude.resume(URL, pause_after=pause, say=said.append)
    assert run.fingerprint() == local.fingerprint()
    assert run.folder.name == URL
    shutil.rmtree(tmp_path / "cache")
    copy = etude.Run(URL)
    assert copy.fingerprint() == local.fingerprint()
    assert copy.summary()["counts"] == local.summary()["counts"]
    assert any(URL in text for text in said)
    with pytest.raises(UsageError, match="exists already and is never overwritten"):
        etude.train(tiny(), URL)
    store = Objects(f"s3://{BUCKET}")
    everywhere = {name: store.get(name) or b"" for name in store.names()}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            everywhere[str(path)] = path.read_bytes()
    assert len(everywhere) > 40
    for place, data in {**everywhere, "said": "\n".join(said).encode()}.items():
        assert KEY.encode() not in data, place
        assert SECRET.encode() not in data, place


def test_commands_read_runs_in_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny().replace(clock__total_timesteps=2048, clock__iterations=1)
    etude.train(recipe, f"s3://{BUCKET}/runs/a/s0")
    etude.train(recipe.replace(seed=1), f"s3://{BUCKET}/runs/a/s1").folder.close()
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    assert main(["runs", f"s3://{BUCKET}/runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted(each["path"][-2:] for each in listed) == ["s0", "s1"]
    assert {(each["state"], each["steps"]) for each in listed} == {("finished", 2048)}
    assert all(each["bytes"] > 100_000 and each["age"] < 60 for each in listed)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # a list reads small files only
    assert main(["eval", f"s3://{BUCKET}/runs/a/s0", "--episodes", "2"]) == 0
    assert f"Kept in s3://{BUCKET}/runs/a/s0/evaluations" in capsys.readouterr().out
    place = f"s3://{BUCKET}/runs/a/s0/checkpoints/000000001024"
    assert main(["eval", place, "--episodes", "2"]) == 0
    names = stored.read_index(Objects(f"s3://{BUCKET}/runs/a/s0"))[0].files  # type: ignore[index]
    assert {"evaluations/000000002048-fresh", "evaluations/000000001024-fresh"} <= names.keys()
    assert main(["report", f"s3://{BUCKET}/runs/a", "-o", "page.html"]) == 0
    assert "2 runs" in capsys.readouterr().out
    held = StoredRun.claim(f"s3://{BUCKET}/runs/a/s1")
    assert main(["runs", f"s3://{BUCKET}/runs/a/s1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "running"
    held.close()
    assert main(["runs", f"s3://{BUCKET}/none"]) == 2
    assert main(["eval", f"s3://{BUCKET}/none"]) == 2
    assert f"There are no runs in s3://{BUCKET}/none." in capsys.readouterr().err


def test_a_store_that_is_away_for_a_while(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, says so once it cannot save and once it can again."""
    monkeypatch.setattr(objects, "PATIENCE", 0.3)
    with Relay(server.endpoint) as relay, environment(relay.endpoint):
        run = begun(recipe="one", lease=30.0)
        said: list[str] = []
        run.report_to(said.append)
        relay.chance = 1.0
        monkeypatch.setattr(relay, "_chosen", lambda: ("refused", 0.0))
        written(run, checkpoint="of the outage")
        run.publish()
        assert "is on this machine only" in said[0]
        assert str(run.folder) in said[0]
        monkeypatch.setattr(relay, "_chosen", lambda: ("", 0.0))
        run.publish()
        assert said[1:] == [f"{URL} has every save again."]
        run.close()
    assert (stored.mirror(URL) / "checkpoint").read_text() == "of the outage"


def test_what_readers_add_is_published() -> None:
    run = begun(recipe="one")
    (run.folder / "replay" / "shard-0").mkdir(parents=True)
    (run.folder / "replay" / "shard-0" / "steps-000000000000.bin").write_bytes(b"replay")
    run.close()
    copy = stored.mirror(URL)
    assert not (copy / "replay").is_file()
    assert not list(copy.rglob("*.bin"))
    found = stored.copy_of(copy)
    serial = stored._origin(copy).serial
    found.publish()
    assert stored._origin(copy).serial == serial  # nothing was added
    (copy / "result.json").write_text("new")
    found.publish()
    again = StoredRun.claim(URL)
    assert (again.folder / "result.json").read_text() == "new"
    assert (again.folder / "replay/shard-0/steps-000000000000.bin").read_bytes() == b"replay"
    (copy / "late.json").write_text("while it is written")
    found.publish()
    assert "late.json" not in again._index.files
    again.close()


def test_an_origin_elsewhere_names_no_place_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "foreign" / "run").mkdir(parents=True)
    stored.note_origin(tmp_path / "foreign" / "run", URL, Index())
    assert stored.copy_of(tmp_path / "foreign" / "run").url == ""


@pytest.mark.parametrize(
    "files",
    [
        {"../outside": {}},
        {"/etc/x": {"pieces": []}},
        {"a/../../b": {"link": "c"}},
        {"latest": {"link": "../../x"}},
        {"a": {"pieces": [["recipe.yaml", 4]]}},
        {"a": {"pieces": [["", -1]]}},
        {"a": 3},
    ],
)
def test_a_hostile_index_writes_nothing_outside(files: dict[str, object]) -> None:
    document = encode_sealed({"format": 1, "files": files, "epoch": 1, "serial": 1})
    Objects(URL).put(stored.INDEX, document)
    with pytest.raises(StoreFault, match="is damaged, or is not the index of a run"):
        stored.mirror(URL)


def test_a_damaged_object_is_refused() -> None:
    run = begun(recipe="one")
    name = run._index.files["recipe"]["pieces"][0][0]
    run.close()
    Objects(URL).put(name, b"two")
    with pytest.raises(StoreFault, match="is damaged"):
        stored.mirror(URL)
    Objects(URL).delete([name])
    with pytest.raises(StoreFault, match="does not have"):
        stored.mirror(URL)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"s3://{KEY}:{SECRET}@bucket/x", "must not hold credentials"),
        (f"s3://{SECRET}@bucket/x", "must not hold credentials"),
        (f"s3://bucket/x?X-Amz-Signature={SECRET}", "put keys and tokens into the"),
        ("s3://bucket/../x", "does not name a place"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Objects(url)
    assert SECRET not in str(caught.value)


def test_urls_and_paths() -> None:
    assert store_url("s3://b/runs/x/") == store_url(Path("s3://b/runs/x")) == "s3://b/runs/x"
    assert store_url("runs/x") == store_url("/s3/x") == store_url("C:/x") == ""


def test_refusals_do_not_show_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers a wrong signature with the key and what was signed."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<Error><Code>SignatureDoesNotMatch</Code><Key>{KEY} {SECRET}</Key></Error>"
            self.send_response(403)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    here = environment(f"http://127.0.0.1:{listening.server_port}")
    with here, pytest.raises(StoreFault, match="refuses these credentials") as caught:
        Objects(URL).get("run.json")
    listening.shutdown()
    chain = repr(caught.value.__cause__) + str(caught.value)
    assert KEY not in chain
    assert SECRET not in chain


def test_a_bucket_that_does_not_exist() -> None:
    with pytest.raises(StoreFault, match="the bucket does not exist"):
        Objects("s3://nowhere/x").put("a", b"")
    with pytest.raises(UsageError, match="There is no run"):
        stored.mirror(f"s3://{BUCKET}/runs/none")
