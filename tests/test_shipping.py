"""What the repository says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))


def project(folder: str = ".") -> dict[str, Any]:
    text = (ROOT / folder / "pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def test_versions_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {project()["version"], project("runtime")["version"], citation["version"]}
    assert len(versions) == 1
    assert citation["license"] == project()["license"] == project("runtime")["license"]
    assert (ROOT / "LICENSE").read_text() == (ROOT / "runtime/LICENSE").read_text()


@pytest.mark.parametrize("folder", [".", "runtime"])
def test_every_bound_has_its_reason(folder: str) -> None:
    lines = (ROOT / folder / "pyproject.toml").read_text().splitlines()
    of_extras = "|".join(name for name in project(folder)["optional-dependencies"] if name != "dev")
    wanted = {*project(folder)["dependencies"]}
    for line in lines:
        listed = re.match(r'  "([^"]+)",', line)
        if (listed and listed[1] in wanted) or re.match(rf"({of_extras}) = \[", line):
            assert re.search(r"# \w", line), line
            wanted -= {listed[1]} if listed else set()
    assert not wanted


def pins(name: str) -> dict[str, Requirement]:
    """{package: what a lock has of it}; every one with the hashes of its files."""
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|file:|--(?!hash=sha256:[0-9a-f]{64}\b)", _uncommented(text))
    records = _uncommented(text).replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in record for record in records)
    found = [Requirement(record.partition(" --hash")[0]) for record in records]
    assert not [pin for pin in found if pin.url or not str(pin.specifier).startswith("==")]
    return {
        canonicalize_name(pin.name): pin
        for pin in found
        if pin.marker is None or pin.marker.evaluate()
    }


def _uncommented(text: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not line.startswith("#"))


def test_the_lock_has_every_dependency_within_its_bounds() -> None:
    locked, cuda = pins("requirements-dev.txt"), pins("requirements-cuda.txt")
    extras = project()["optional-dependencies"]
    for text in [*project()["dependencies"], *extras["dev"], *extras["video"]]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            pin = locked[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), text
    # CI has torch for the CPU: what only CUDA needs would fill its disk.
    assert not locked.keys() & cuda.keys()
    assert not [name for name in locked if name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    for action in used:
        assert re.fullmatch(r"\./\S+|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_dev_has_the_extras_that_tests_use() -> None:
    extras = project()["optional-dependencies"]
    bounds = {Requirement(text).name: text for text in extras["dev"]}
    for name in set(extras) - {"dev", "video", "gymnasium", "minari"}:
        for text in extras[name]:
            assert bounds.get(Requirement(text).name) == text, f"{name}: {text}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_and_forms_can_be_read(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    for job in document.get("jobs", {}).values():
        assert job["timeout-minutes"] <= 90
        steps = job["steps"]
        assert all(("run" in step) != ("uses" in step) for step in steps)
        for own in (s["uses"] for s in steps if s.get("uses", "").startswith("./")):
            assert (ROOT / own / "action.yml").is_file()
    if "jobs" in document:
        assert document["permissions"] == {"contents": "read"}
    if path.parent.name == "ISSUE_TEMPLATE" and "body" in document:
        assert {"name", "description"} <= document.keys()
        assert all("label" in each["attributes"] for each in document["body"])


def test_every_supported_python_is_tested() -> None:
    told = re.findall(r"3\.\d+", " ".join(project()["classifiers"]))
    for name in ("test", "release"):
        jobs = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
        matrices = [job["strategy"]["matrix"] for job in jobs.values() if "strategy" in job]
        assert [matrix["python"] for matrix in matrices] == [told]
    assert project()["requires-python"] == f">={told[0]}" == project("runtime")["requires-python"]


def test_the_image_is_made_of_files_that_are_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = {
        name for line in re.findall(r"^COPY (?!--)(.*)$", text, re.M) for name in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    manifest = re.findall(r"^include (.*)$", (ROOT / "MANIFEST.in").read_text(), re.M)
    assert {*" ".join(manifest).split()} < copied


def test_every_dependency_has_its_licence_told() -> None:
    licences = (ROOT / "docs/installing.md").read_text().partition("## Licences")[2].lower()
    extras = project()["optional-dependencies"]
    texts = [*project()["dependencies"], *(t for n, ts in extras.items() if n != "dev" for t in ts)]
    for text in [*texts, *project("runtime")["dependencies"]]:
        assert f"| {Requirement(text).name.lower()} |" in licences, text
