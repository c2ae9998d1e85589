"""Hashes of the code that a run computes with: what they cover, and what they do not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import etude
from etude.core import user_code

ENV = """
import json

from helpers import Spring


class Env:
    def step(self):
        from helpers.lazily import push

        return push(Spring())
"""


def install(folder: Path, name: str, version: str = "1.0", needs: str = "") -> Path:
    """A package as pip leaves it."""
    package, about = folder / name, folder / f"{name}-{version}.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    about.mkdir()
    (package / "__init__.py").write_text("STIFFNESS = 4.0\n")
    required = f"Requires-Dist: {needs}\n" if needs else ""
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}"
    )
    (about / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return package


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that uses modules of its project and an installed package."""
    site, root = tmp_path / "site", tmp_path / "project"
    (root / "helpers").mkdir(parents=True)
    (root / "my_env.py").write_text(ENV)
    (root / "helpers" / "__init__.py").write_text("from .springs import Spring\n")
    (root / "helpers" / "springs.py").write_text("import springkit.model\nclass Spring: ...\n")
    (root / "helpers" / "lazily.py").write_text("def push(spring): return 1.0\n")
    (root / "unrelated.py").write_text("")
    install(site, "springkit", needs="coilkit>=1; python_version > '3'").joinpath(
        "model.xml"
    ).write_text("<mujoco/>")
    (site / "springkit" / "model.py").write_text("")
    install(site, "coilkit")
    monkeypatch.setattr(user_code, "_site_folders", lambda: (site,))
    monkeypatch.syspath_prepend(root)
    monkeypatch.syspath_prepend(site)
    return tmp_path


def changed(change: Path, text: str = "# another line\n") -> list[str]:
    """The names whose hash is another one after a line was added to a file."""
    before = user_code.compute_hashes(["my_env"])
    with change.open("a") as stream:
        stream.write(text)
    return user_code.differing(before, user_code.compute_hashes(["my_env"]))


def test_it_covers_what_an_environment_imports(project: Path) -> None:
    found = user_code.compute_hashes(["my_env"])
    assert set(found) == {
        *("etude", "my_env", "helpers", "helpers.springs", "helpers.lazily", "springkit"),
        *("springkit (version)", "coilkit (version)"),
    }
    assert found["coilkit (version)"] == "1.0"
    assert user_code.compute_hashes(["my_env"]) == found
    assert not {"my_env", "helpers", "springkit"} & sys.modules.keys(), "nothing is imported"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("project/my_env.py", "my_env"),
        ("project/helpers/__init__.py", "helpers"),
        ("project/helpers/springs.py", "helpers.springs"),
        ("project/helpers/lazily.py", "helpers.lazily"),
        ("site/springkit/__init__.py", "springkit"),
        ("site/springkit/model.xml", "springkit"),
    ],
)
def test_a_change_names_what_was_changed(file: str, name: str, project: Path) -> None:
    assert changed(project / file) == [name]


def test_other_code_does_not_count(project: Path) -> None:
    assert changed(project / "project" / "unrelated.py") == []
    assert changed(project / "site" / "coilkit" / "__init__.py") == []  # by its version
    before = user_code.compute_hashes(["my_env"])
    shutil.copytree(project, project.with_name("elsewhere"))
    assert user_code.compute_hashes(["my_env"]) == before


def test_a_required_package_counts_by_version(project: Path) -> None:
    before = user_code.compute_hashes(["my_env"])
    shutil.rmtree(project / "site" / "coilkit-1.0.dist-info")
    install(project / "site", "coilkit", "1.1")
    assert user_code.differing(before, user_code.compute_hashes(["my_env"])) == [
        "coilkit (version)"
    ]


def test_a_file_is_named_with_its_folder(project: Path) -> None:
    """Wherever the project stands."""
    found = user_code.compute_hashes([str(project / "project" / "my_env.py")])
    assert {"project/my_env.py", "helpers", "springkit"} <= found.keys()


def test_own_sources_count_where_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "etude"
    shutil.copytree(Path(etude.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(user_code, "__file__", str(copy / "core" / "code.py"))
    before = user_code.compute_hashes([])
    for file, counts in (
        ("cli/plan.py", False),
        ("compare/outputs.py", False),
        ("rl/ppo.py", True),
        ("core/keys.py", True),
        ("envs/robots/go1/go1.xml", True),
    ):
        with (copy / file).open("a") as stream:
            stream.write("\n")
        now = user_code.compute_hashes([])
        assert (user_code.differing(before, now) == ["etude"]) == counts, file
        before = now
