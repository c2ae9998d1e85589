"""Runs as bundles: made, moved, verified, trained again, and uploaded to a stub of a hub."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
from safetensors.numpy import load_file

from etude.api import resume, train
from etude.cli.main import main
from etude.core.clock import ClockConfig
from etude.core.keys import Key
from etude.evaluate import film
from etude.models.policies import make_policy
from etude.planning import recipes
from etude.runs import bundle, onnx_files
from etude.runs.checkpoint import load_policy_parts, policy_part
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.metrics_log import chain_of
from etude.share import verify as verifying
from etude.share.export import Replay, largest_difference, torch_actions

CLOCK = ClockConfig(total_timesteps=4_096, cycles=1, iterations=2)


def fake_film(*arguments: Any) -> None:
    """Films take minutes to draw; these begin as films do."""
    folder = arguments[4]
    (folder / "success.png").write_bytes(b"\x89PNG\r\n\x1a\n rest")
    (folder / "success.mp4").write_bytes(b"\0\0\0\x20ftypisom rest")
    (folder / "success.webp").write_bytes(b"RIFF\0\0\0\0WEBP rest")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipes.find("reach-short").replace(clock=CLOCK)
    return train(recipe, tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture(scope="module")
def shared(run: Path) -> Path:
    """A bundle with everything in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(film, "check", lambda recipe: None)
        patch.setattr(film, "film", fake_film)
        to = run.parent / "shared"
        options = ["--license", "mit", "--episodes", "40"]
        assert main(["bundle", str(run), "--to", str(to), *options]) == 0
    return to


@pytest.fixture
def copied(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared, tmp_path / "moved"))


def reseal(folder: Path, **about: Any) -> None:
    """Make every hash right again, as one would who wants a change to go unnoticed."""
    old = decode_sealed((folder / bundle.INDEX).read_bytes())
    (folder / bundle.INDEX).unlink()
    kept = {name: old[name] for name in old if name not in ("format", "files")}
    bundle.seal(folder, kept | about)


def verified(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What `etude verify --json` prints, and its exit code."""
    capsys.readouterr()
    code = main(["verify", str(path), "--json", *options])
    document = json.loads(capsys.readouterr().out)
    findings = {each["what"]: each for each in document["findings"]}
    return {**document, "code": code, "findings": findings}


@pytest.mark.rotated(together=True)
def test_the_card_says_what_it_is(shared: Path, run: Path) -> None:
    text = (shared / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "mit"
    about = json.loads((shared / "bundle.json").read_text())
    for needed in (
        *about["fingerprint"].values(),
        *("etude train recipe.yaml", "etude verify . --retrain", "evaluation/success.webp"),
        *("mean return", "40 fresh episodes", "torch", "numpy", "mujoco", "## Licence\n\nmit"),
    ):
        assert needed in body
    assert str(run) not in text


@pytest.mark.rotated(together=True)
def test_a_moved_bundle_verifies_in_another_process(
    shared: Path, run: Path, tmp_path: Path
) -> None:
    """As a tar, from another folder, by somebody without anything of who made it."""
    path = tmp_path / "there" / "moved.tar"
    path.parent.mkdir()
    bundle.pack(shared, path)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "etude", "verify", "moved.tar"]
    environment = {**kept, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "Verified."
    assert "40 played again, the same bit for bit" in done.stdout
    assert [p.name for p in path.parent.iterdir()] == ["moved.tar"]


@pytest.mark.rotated(together=True)
def test_one_flipped_byte_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [path for path in sorted(copied.rglob("*")) if path.is_file()]
    assert len(files) == 18
    for path in files:
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        path.write_bytes(flipped)
        found = verified(copied, capsys, "--files-only")
        assert (found["code"], [*found["damaged"]]) == (1, [str(path.relative_to(copied))])
        path.write_bytes(whole)
    assert main(["verify", str(copied), "--files-only"]) == 0
    assert "results were not repeated" in capsys.readouterr().out


@pytest.mark.rotated(together=True)
def test_training_again_gives_the_same_fingerprint(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    found = verified(copied, capsys, "--retrain", "--folder", str(again))
    assert found["code"] == 0
    assert found["exact"]
    assert found["findings"]["retrained"]["verdict"] == "same"
    # The fingerprint is genuine, the policy is not.
    swap_policy(copied)
    found = verified(copied, capsys, "--retrain", "--folder", str(again))
    verdicts = {what: each["verdict"] for what, each in found["findings"].items()}
    assert found["code"] == 1
    assert verdicts == {
        **{"metrics": "same", "onnx": "differs", "episodes": "differs"},
        "retrained": "differs",
    }
    # Neither does a run of another recipe count.
    recipe = copied / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 1"))
    reseal(copied)
    assert main(["verify", str(copied), "--retrain", "--folder", str(again)]) == 2


def swap_policy(folder: Path) -> None:
    """Give a bundle other weights with all hashes right."""
    arrays, contract = load_policy_parts(folder / "policy")
    name = max(arrays, key=lambda name: arrays[name].numel())
    shutil.rmtree(folder / "policy")
    part = policy_part({**arrays, name: arrays[name] + 0.01}, contract)
    part.write(folder / "policy", 4_096)
    reseal(folder)


def rewritten(folder: Path, change: float) -> None:
    """Change the return of every episode."""
    path = folder / "evaluation" / "episodes.csv"
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    for row in rows:
        row["return"] = f"{float(row['return']) + change:.9g}"
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(stream.getvalue())
    reseal(folder)


@pytest.mark.rotated(together=True)
def test_other_results_count_where_nothing_decisive_is_different(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(copied, 1e-6)
    found = verified(copied, capsys)
    assert found["code"] == 1
    assert "where all should be" in found["findings"]["episodes"]["words"]


@pytest.mark.rotated(together=True)
def test_another_version_is_said_and_results_are_compared(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = decode_sealed((copied / "manifest.json").read_bytes())
    manifest["versions"]["numpy"] = "1.0"
    (copied / "manifest.json").write_bytes(encode_sealed(manifest))
    rewritten(copied, 1e-6)
    assert main(["verify", str(copied)]) == 0
    said = capsys.readouterr().out
    assert "The version of numpy was 1.0 and is" in said
    assert "results are compared statistically" in said
    assert "Verified, but not bit for bit: episodes." in said
    rewritten(copied, 5.0)
    assert verified(copied, capsys)["findings"]["episodes"]["verdict"] == "differs"


def test_fingerprints_of_an_older_version_are_known(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"a": 1, "time/b": 2.5}\n{"c": null, "a": 0.5}\n')
    older = hashlib.sha256(b'[{"a": 1}, {"a": 0.5, "c": null}]').hexdigest()
    rows = [{"a": 1, "time/b": 9.0}, {"c": None, "a": 0.5}]
    for digest, verdict in ((older, "same"), (chain_of(rows), "same"), ("0" * 64, "differs")):
        about = {"fingerprint": {"metrics": digest}}
        assert verifying.check_metrics(tmp_path, about).verdict == verdict


@pytest.mark.rotated(together=True)
def test_metrics_are_held_against_the_fingerprint(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/success_rate": 0', '"eval/success_rate": 1'))
    reseal(copied)
    assert verified(copied, capsys)["findings"]["metrics"]["verdict"] == "differs"


@pytest.mark.rotated(together=True)
def test_code_that_a_bundle_names_needs_trust(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "not_yours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    recipe["env"] = {"kind": "task", "task": "not_yours:Task"}
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    reseal(copied)
    assert verified(copied, capsys, "--files-only")["code"] == 0
    for options in ([], ["--retrain"]):
        assert main(["verify", str(copied), *options]) == 2
        assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["verify", str(copied), "--trust"]) == 2  # there is no Task in it
    assert (tmp_path / "ran").exists()


@pytest.mark.rotated(together=True)
def test_a_run_that_its_recipe_does_not_give_is_not_trained_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = Path(shutil.copytree(run, tmp_path / "longer", symlinks=True))
    resume(longer, total_timesteps=8_192)
    options = ["--no-film", "--no-onnx", "--episodes", "8"]
    assert main(["bundle", str(longer), "--to", str(tmp_path / "b"), *options]) == 0
    assert "gives another run: its recipe was changed" in (tmp_path / "b/README.md").read_text()
    assert main(["verify", str(tmp_path / "b"), "--retrain"]) == 2
    assert "its recipe was changed on the way" in capsys.readouterr().err


def kinds_of_bytes(path: Path) -> str:
    """What a file is, found out without this package; raises where it is something else."""
    data = path.read_bytes()
    for start in (b"#!", b"PK\x03\x04", b"\x7fELF", b"\x80\x04", b"\x80\x05", b"MZ", b"\x1f\x8b"):
        assert not data.startswith(start), path
    match path.suffix:
        case ".json":
            json.loads(data)
        case ".jsonl":
            [json.loads(line) for line in data.splitlines()]
        case ".yaml":
            yaml.safe_load(data)  # refuses whatever would make objects
        case ".csv":
            assert len({len(row) for row in csv.reader(io.StringIO(data.decode()))}) == 1
        case ".safetensors":
            load_file(path)
        case ".onnx":
            assert json.loads(onnx_files.check(data))["format"] == 1
        case ".xml":
            tags = {element.tag for element in ElementTree.fromstring(data).iter()}
            assert not tags & {"plugin", "extension", "include"}
        case ".md" | ".txt":
            assert "<script" not in data.decode()
        case ".png" | ".mp4" | ".webp":
            pass
        case _:
            raise AssertionError(f"{path} is of no known kind")
    return path.suffix


@pytest.mark.rotated(together=True)
def test_no_file_of_a_bundle_is_code(shared: Path) -> None:
    found = {kinds_of_bytes(path) for path in shared.rglob("*") if path.is_file()}
    assert {".json", ".yaml", ".csv", ".safetensors", ".onnx", ".xml", ".md", ".txt"} <= found
    assert not [path for path in shared.rglob("*") if path.is_file() and os.access(path, os.X_OK)]


def test_nan_is_a_difference_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.find("reach-short")
    env = recipe.task.make(1)
    policy = make_policy(recipe.policy, env.spec, Key(0))
    seen = {name: np.zeros((1, *x.shape), np.float32) for name, x in policy.observations.items()}
    starts: Any = np.ones(1, np.bool_)
    actions = torch_actions(policy, seen, starts)
    session = SimpleNamespace(run=lambda *_: [np.full_like(actions, np.nan)])
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: session)
    assert np.isnan(largest_difference(b"", policy, Replay(seen, starts, actions)))
    env.close()


class Stub(BaseHTTPRequestHandler):
    """The part of a hub's protocol that an upload uses."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer([] if "/tree/" in self.path else {"id": "me/reach", "sha": "b" * 40})

    def do_POST(self) -> None:
        body = self._body()
        self.server.seen.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
        here = f"http://{self.headers['Host']}/me/reach"
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._answer({"files": [{"path": path, **plain} for path in paths]})
        elif "/commit/" in self.path:
            self._answer({"commitOid": "a" * 40, "commitUrl": f"{here}/commit/{'a' * 40}"})
        else:
            self._answer({"url": here})

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("huggingface_hub")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_stub")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.rotated(together=True)
def test_an_upload_sends_the_files_of_the_bundle(copied: Path, hub: Any, capsys: Any) -> None:
    (copied / ".gitattributes").write_text("what git keeps here stays here")
    assert main(["bundle", str(copied), "--upload", "me/reach", "--private"]) == 0
    assert "Uploaded to http://127.0.0.1" in capsys.readouterr().out
    posts = {path: (token, body) for path, token, body in hub.seen}
    token, created = posts["/api/repos/create"]
    assert token == "Bearer hf_stub"
    assert json.loads(created)["organization"] == "me"
    assert b"private" in created
    commit = next(body for path, (_, body) in posts.items() if "/commit/" in path)
    lines = [json.loads(line) for line in commit.splitlines()]
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in lines
        if line["key"] == "file"
    }
    expected = {str(p.relative_to(copied)): p for p in copied.rglob("*") if p.is_file()}
    expected.pop(".gitattributes")
    assert sent == {name: path.read_bytes() for name, path in expected.items()}


@pytest.mark.rotated(together=True)
def test_what_is_not_whole_is_not_uploaded(copied: Path, hub: Any, capsys: Any) -> None:
    (copied / "private.txt").write_text("mine")
    assert main(["bundle", str(copied), "--upload", "me/reach"]) == 1
    assert "private.txt is not part of the bundle" in capsys.readouterr().err
    assert hub.seen == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("bundle nothing", "There is no run nothing"),
        ("bundle x --private", "add --upload"),
        ("bundle x --upload x", "USER/NAME"),
        ("verify nothing", "There is no bundle at nothing"),
        ("verify x --folder y", "add --retrain"),
        ("verify x --files-only --retrain", "leave one of them out"),
    ],
)
def test_wrong_commands_end_in_a_sentence(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert said in capsys.readouterr().err
