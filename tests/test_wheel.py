"""Both packages as they are published: built, checked, and used where there is no checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("twine")
from etude.cli.watching import DEMO_FOLDER, DEMOS
from etude.core.errors import EtudeError
from etude.envs.mujoco import rendering
from installing import ENVIRONMENT, ROOT, build, install

pytestmark = pytest.mark.rotated


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """{package: (wheel, source archive)}."""
    packages = {"etude": ROOT, "runtime": ROOT / "runtime"}
    return {name: build(path, tmp_path_factory.mktemp(name)) for name, path in packages.items()}


def test_both_packages_can_be_published(built: dict[str, tuple[Path, Path]]) -> None:
    files = [str(path) for pair in built.values() for path in pair]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "root"), [("etude", ROOT), ("runtime", ROOT / "runtime")])
def test_every_file_of_a_package_is_in_its_wheel(
    name: str, root: Path, built: dict[str, tuple[Path, Path]]
) -> None:
    wheel, archive = built[name]
    source = root / "src"
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    wanted = {p for p in wanted if "__pycache__" not in p and ".egg-info" not in p}
    assert len(wanted) > 5
    with zipfile.ZipFile(wheel) as opened:
        inside = {file for file in opened.namelist() if ".dist-info/" not in file}
    assert inside == wanted
    with tarfile.open(archive) as packed:
        there = {file.partition("/")[2] for file in packed.getnames()}
    assert {f"src/{file}" for file in wanted} <= there
    assert {"pyproject.toml", "README.md", "LICENSE"} <= there
    assert not [file for file in there if file.startswith(("tests", "gates", "."))]


def test_demos_hold_arrays_and_texts_alone() -> None:
    assert sorted(path.name for path in DEMO_FOLDER.iterdir()) == sorted(DEMOS)
    for folder in DEMO_FOLDER.iterdir():
        names = {path.name for path in folder.iterdir()}
        assert names == {"arrays.safetensors", "contract.json", "manifest.json"}
        assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000


def test_the_wheel_trains_and_shows_where_there_is_no_checkout(
    built: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    commands, work = install(built["etude"][0], tmp_path / "env"), tmp_path / "work"
    work.mkdir()

    def run(*arguments: str) -> str:
        command = [commands / "etude", *arguments]
        done = subprocess.run(command, cwd=work, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = [commands / "python", "-c", "import etude; print(etude.__file__)"]
    found = subprocess.run(where, cwd=work, env=ENVIRONMENT, capture_output=True, text=True).stdout
    assert found.startswith(str(tmp_path / "env"))
    clock = ["--clock.total-timesteps", "4096", "--clock.cycles", "1", "--clock.iterations", "1"]
    assert "success" in run("train", "reach", *clock, "--folder", "run")
    run("report", "run", "-o", "page.html")  # its script and style come with the package
    assert "</html>" in (work / "page.html").read_text()
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))
    assert "film.webp" in run("demo", "walk-go1", "--seconds", "0.2", "--film", "film.webp")
    assert (work / "film.webp").stat().st_size > 1000
