"""Notebooks: those of the documentation, and that a run in one is that of a script."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from etude.core.errors import EtudeError
from etude.evaluate import film

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SECONDS = 600
"""Most seconds of a cell, on a busy machine."""
TRAIN = """
import etude
from etude.evaluate.evaluation import examine
recipe = etude.recipes.reach_short().replace(clock__total_timesteps=4096)
run = etude.train(recipe, FOLDER)
lines = []
made = examine(run.recipe, run.path, 4, 0, False, lines.append)
"""


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels inherit: commands of this environment, and a folder of their own."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def execute(notebook: Any, folder: Path) -> list[Any]:
    """The outputs of each cell of code, executed in a folder."""
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def notebook_of(*cells: str) -> Any:
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return nbformat.v4.new_notebook(cells=made)


def html_of(outputs: list[Any]) -> list[str]:
    return [each.data["text/html"] for each in outputs if "text/html" in each.get("data", {})]


@pytest.mark.slow
def test_a_run_in_a_notebook_has_the_files_of_a_script(tmp_path: Path) -> None:
    script = f"FOLDER = 'script'\n{TRAIN}\nprint(run.fingerprint())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")

    cells = [
        f"FOLDER = 'notebook'\n{TRAIN}",
        "print(run.fingerprint())",
        *("run", "run.recipe", "etude.plan(run.recipe)", "run.policy()", "run.plot()"),
        "etude.train(recipe, 'quiet', console=False).path.name",
        "etude.resume(run.path, total_timesteps=6144).path.name",
        "etude.train(recipe, 'table', console=True).path.name",
        "'train' in dir(etude)",
    ]
    outputs = execute(notebook_of(*cells), tmp_path)
    trained, fingerprint, run, recipe, plan, policy, plot, quiet, resumed, table, listed = outputs
    # One line of progress, and nothing else: no plan and no table.
    assert len(trained) == 1
    line = html_of(trained)[0]
    assert '<progress max="1" value="1.0000">' in line
    assert re.search(r"finished, .* 4,096 steps in .* s, [\d,]+ steps/s, notebook", line)
    assert [each.output_type for each in quiet] == ["execute_result"]
    assert "2,048 steps in" in html_of(resumed)[0]
    assert "fps" in table[0].text
    assert fingerprint[0].text == done.stdout
    for shown, word in ((run, "finished"), (recipe, "algorithm"), (plan, "epochs"), (policy, "7")):
        assert word in html_of(shown)[0]
    assert "image/png" in plot[0].data
    assert listed[0].data["text/plain"] == "True"

    for name in ("plan.txt", "plan.json", "recipe.yaml"):
        there, here = (tmp_path / folder / name for folder in ("script", "quiet"))
        assert here.read_bytes() == there.read_bytes(), name
        assert len(here.read_bytes()) > 500
    reports = [
        sorted((tmp_path / name).glob("evaluations/*/report.txt"))
        for name in ("script", "notebook")
    ]
    assert [each.read_bytes() for each in reports[0]] == [each.read_bytes() for each in reports[1]]
    assert all(each.stat().st_size > 100 for each in reports[1])


def test_notebooks_are_stored_without_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["1-train", "2-compare", "3-use"]
    page = (ROOT / "docs/notebooks.md").read_text()
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code), path.name
        assert f"notebooks/{path.name}" in page


@pytest.mark.rotated
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_of_the_documentation_does_what_it_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    if "run.film" in text:
        from etude.planning import recipes

        try:
            film.check(recipes.find("reach-short"))
        except EtudeError as error:
            pytest.skip(str(error))
    if "etude.export" in text and importlib.util.find_spec("onnx") is None:
        pytest.skip("pip install 'etude[export]'")
    outputs = execute(nbformat.read(path, 4), tmp_path)  # raises if a cell does
    pages = [page for cell in outputs for page in html_of(cell)]
    assert any('<progress max="1" value="1.0000">' in page for page in pages)
    assert not [each for cell in outputs for each in cell if each.output_type == "error"]
    if "run.film" in text:
        assert any("data:image/webp;base64," in page for page in pages)
    printed = [each.text for cell in outputs for each in cell if each.output_type == "stream"]
    assert not [each for each in printed if "Traceback" in each or "rror:" in each]
