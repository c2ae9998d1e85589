"""How runs, recipes, plans and policies show themselves at a prompt and in a notebook."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import rich.console
from PIL import Image

import etude
from etude.core.errors import UsageError
from etude.core.output import html_table, html_text, rendered
from etude.evaluate.film import Films
from etude.planning.plan import render
from toys import tiny_reach

NAME = "<script>alert(1)</script>"
"""The name of a recipe from a stranger."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> etude.Run:
    recipe = tiny_reach(12, logs={"tensorboard": False}).replace(name=NAME)
    return etude.train(recipe, tmp_path_factory.mktemp("runs") / "<i>run")


def test_public_names_are_listed() -> None:
    assert set(etude.__all__) <= set(dir(etude))
    assert "os" not in dir(etude)
    assert {"reach_short", "hopper"} <= set(dir(etude.recipes))
    assert all(hasattr(etude, name) for name in dir(etude))


def test_a_text_is_the_same_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = etude.plan(tiny_reach())
    there = render(plan)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert render(plan) == there
    assert rendered(["a line"]) == "a line\n"


def test_each_has_one_line_with_what_it_is(run: etude.Run) -> None:
    plan, policy = etude.plan(run.recipe), run.policy("latest")
    lines = [repr(each) for each in (run, run.recipe, plan, policy)]
    assert all("\n" not in line and len(line) < 300 for line in lines)
    assert lines[0].startswith(f"<Run {str(run.path)!r}: recipe {NAME!r}, seed 0, state finished,")
    assert "progress 3,072 steps in" in lines[0]
    assert lines[1] == (
        f"<Recipe {NAME!r}: algorithm ppo, environment reach, length 3,072 steps, seed 0>"
    )
    assert lines[2] == f"<Plan {NAME!r}, seed 0: 3,072 steps, 88 gradient steps, exact>"
    assert lines[3] == "<policy mlp: reads state (25,); acts box>"
    assert str(plan) == render(plan)


def test_notebooks_show_no_markup_of_a_stranger(run: etude.Run) -> None:
    for each in (run, run.recipe, etude.plan(run.recipe), run.policy("latest")):
        page = each._repr_html_()
        assert "<script" not in page
        assert "<i>" not in page
    assert "&lt;script&gt;" in run.recipe._repr_html_()
    assert html_table("<b>", {"<b>": "<b>"}).count("&lt;b&gt;") == 3
    assert html_text("<b>", "</pre>").count("</pre>") == 1


def test_a_run_that_did_not_begin_and_a_damaged_one_show_themselves(
    run: etude.Run, tmp_path: Path
) -> None:
    from etude.api import create
    from etude.planning.resolve import resolve

    fresh = create(resolve(tiny_reach()), tmp_path / "fresh")
    assert "state not begun" in repr(fresh)
    with pytest.raises(UsageError, match="has no log rows yet"):
        fresh.plot()
    fresh.folder.metrics.write_text("damaged\n")
    (fresh.path / "manifest.json").write_text("damaged")
    assert "state damaged" in repr(fresh)
    assert "state</td>" in fresh._repr_html_()


def test_curves_are_lines_with_the_values_of_the_rows(run: etude.Run) -> None:
    figure = run.plot()
    shown = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert {"return", "success"} <= set(shown)
    lines = {line.get_label(): line for line in shown["return"].get_lines()}
    for label, name in (("training", "rollout/ep_rew_mean"), ("evaluation", "eval/mean_reward")):
        steps, values = run.curves(name)[name]
        assert list(lines[label].get_xdata()) == steps
        assert list(lines[label].get_ydata()) == values
    data, size = figure._repr_png_()
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (2 * size["width"], 2 * size["height"])


def test_metrics_are_chosen_by_name_and_pattern(run: etude.Run) -> None:
    figure = run.plot("train/*_loss", "reward/hold")
    names = {axes.get_title(loc="left") for axes in figure.axes if axes.axison}
    assert names == {"reward/hold", *run.curves("train/*_loss")}
    with pytest.raises(UsageError, match="has no metric 'train/nothing'"):
        run.plot("reward/hold", "train/nothing")


def test_films_show_one_file_of_each_outcome(tmp_path: Path) -> None:
    names = ["success.png", "success.mp4", "success.webp", "failure.png", "failure.mp4", "<b>.png"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    films = Films(tmp_path / name for name in [*names, "gone.mp4"])
    assert films == [tmp_path / name for name in [*names, "gone.mp4"]]
    page = films._repr_html_()
    assert page.count("<img") == 2
    assert page.count("<video") == 1
    assert "data:image/webp;base64," in page
    assert "data:video/mp4;base64," in page
    assert "<b>" not in page
    assert "gone.mp4" in page
