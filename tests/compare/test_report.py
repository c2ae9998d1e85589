"""`etude report`: one page that opens without a network and trusts no run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from test_compare import make_run

from etude.cli.main import main
from etude.cli.report import command_of
from etude.compare.sweeps.halving import STATE, Asked, Sweep, Trial
from etude.planning import recipes
from etude.runs.documents import decode_sealed, encode_sealed

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)><!--\x1b[31m"
HOVER = """<script>
const svg = document.querySelector("figure.chart svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 9, clientY: box.top + 9}));
document.documentElement.dataset.said = document.querySelector("figure.chart .value").textContent;
const log = document.getElementById("log");
log.click();
document.documentElement.dataset.log = document.querySelector("figure.chart text").textContent;
</script></body>"""


class Reader(HTMLParser):
    """What a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    return reader


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an evaluation, a strip of pictures and a film."""
    path = make_run(tmp_path / "run", 3)
    folder = path / "evaluations" / "000000004000-final"
    folder.mkdir()
    Image.new("RGB", (60, 20), "red").save(folder / "failure.png")
    (folder / "failure.mp4").write_bytes(b"\0\0\0\x18ftypisom" + b"x" * 1000)
    (folder / "report.txt").write_text("success 95.0%\n")
    summary = {"eval/success_rate": 0.95, "eval/mean_reward": 19.0, "eval/episodes": 100.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    return path


def test_a_page_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    assert re.search(r"page.html: 0\.0\d MB, 1 run\n", capsys.readouterr().out)
    text = out.read_text()
    for words in ("95.0%", "Recipe", "Health", "fast", "etude train", "Plan", "seed"):
        assert words in text
    assert "data:image/png;base64," in text
    assert "data:video" not in text
    reader = read(out)
    assert reader.scripts == [{"type": "application/json", "id": "data"}, {}]
    assert all(address[:1] == "#" or address[:5] == "data:" for address in reader.addresses)
    assert main(["report", str(run), "--films", "-o", str(out)]) == 0
    assert "data:video/mp4;base64," in out.read_text()


def test_small_films_play_on_the_page(run: Path, tmp_path: Path) -> None:
    folder = run / "evaluations" / "000000004000-final"
    frames = [Image.new("RGB", (60, 20), color) for color in ("red", "blue")]
    frames[0].save(folder / "failure.webp", save_all=True, append_images=frames[1:])
    during = run / "evaluations" / "000000002000-film"
    during.mkdir()
    (during / "film.webp").write_bytes((folder / "failure.webp").read_bytes())
    out = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    text = out.read_text()
    assert text.count('src="data:image/webp;base64,') == 2
    assert text.count('src="data:image/png;base64,') == 1
    assert "<h3>step 4,000, final, failure</h3>" in text
    assert "<h3>step 2,000, film</h3>" in text
    assert "success 95.0%" in text, "a folder of a film has no report to show"


def sweep_of(folder: Path) -> Path:
    """A sweep of four trials over two fields, with two rungs; the last one was refused."""
    recipe = recipes.find("reach-short")
    asked = Asked(("algorithm.learning_rate=1e-4..1e-2:log", "algorithm.minibatch_size=64,128"))
    sweep = Sweep(folder, recipe, replace(asked, trials=4, rungs=2, metric="eval/success_rate"))
    for number, (rate, size, scores) in enumerate(
        [(2e-3, 64, [0.1]), (1e-3, 128, [0.5, 0.9]), (1e-2, 64, [0.2]), (5e-3, 128, [])]
    ):
        values = {"algorithm.learning_rate": rate, "algorithm.minibatch_size": size}
        trial = Trial(number, 0, values, steps=[2000, 4000], scores=scores, ties=scores)
        sweep.trials.append(trial)
        if scores:
            make_run(folder / trial.name, 0)
        else:
            trial.refused = f"it does not divide {HOSTILE}"
    sweep.complete = 2
    sweep.save()
    sweep.close()
    return folder


def test_a_page_of_a_sweep_ranks_its_trials(tmp_path: Path) -> None:
    sweep, out = sweep_of(tmp_path / "sweep"), tmp_path / "page.html"
    assert main(["report", str(sweep), "-o", str(out)]) == 0
    text = out.read_text()
    cells = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    ranked = [re.findall(r"<td[^>]*>(.*?)</td>", cell) for cell in cells][1:5]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", cells[0])
    assert heads[2:4] == ["learning_rate", "minibatch_size"]
    assert ranked[0] == ["1", "t1", "0.001", "128", "50.0%", "90.0%", "best"]
    assert [row[1] for row in ranked] == ["t1", "t2", "t0", "t3"]
    assert "it does not divide &lt;/script&gt;" in ranked[3][-1]
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
    rate, size = data["charts"][:2]
    assert rate["log"], "the axis of a field that was drawn log-uniformly"
    assert [(p["x"], p["y"], p["color"]) for p in rate["points"]] == [
        (2e-3, 0.1, 0),
        (1e-3, 0.9, 1),
        (1e-2, 0.2, 0),
    ]
    assert size["choices"] == ["64", "128"]
    assert [p["x"] for p in size["points"]] == [0, 1, 0]
    assert [s["label"] for s in data["charts"][2]["series"]] == ["t1", "t2", "t0"], "the best first"
    legends = re.findall(r'<div class="legend">(.*?)</div>', text, re.DOTALL)
    names = [re.findall(r"</span>(.*?)</span>", legend) for legend in legends]
    assert names == [["at 2,000", "at 4,000"], ["t1", "t2", "t0"]]
    assert read(out).handlers == []


def test_a_sweep_that_was_tampered_with_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path / "sweep")
    state = decode_sealed((sweep / STATE).read_bytes())
    state["trials"][0]["scores"] = [{"a": 1}]
    (sweep / STATE).write_bytes(encode_sealed(state))
    assert main(["report", str(sweep), "-o", str(tmp_path / "page.html")]) != 0
    assert "scores that are not numbers" in capsys.readouterr().err


def test_a_page_of_several_runs_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        make_run(tmp_path / f"a{seed}", seed, (0.1, 0.5 + seed / 10))
        changes = {"algorithm.learning_rate": 0.5}
        make_run(tmp_path / f"b{seed}", seed, (0.0, seed / 10), changes)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(out)]) == 0
    text = out.read_text()
    assert "A scores higher than B with probability 1.00" in text
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
    assert [len(chart["series"]) for chart in data["charts"]][:2] == [2, 6]
    make_run(tmp_path / "short", 9, (0.1,))
    assert main(["report", str(tmp_path), "-o", str(out)]) == 0
    assert "Without a comparison: The runs have different budgets" in capsys.readouterr().out
    assert "different budgets" in out.read_text()


def test_nothing_of_a_run_is_markup(run: Path, tmp_path: Path) -> None:
    """Whatever a text, a name or a number of a stranger's run says."""
    evil = make_run(
        tmp_path / "<img src=x onerror=alert(2)>",
        1,
        changes={"name": HOSTILE, "algorithm.kind": HOSTILE, HOSTILE: HOSTILE},
    )
    rows = evil / "metrics.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for line in lines:
        line |= {HOSTILE: 1.0, f"rollout/{HOSTILE}": 2.0}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (evil / "plan.txt").write_text(HOSTILE)
    (evil / "manifest.json").write_text(json.dumps({"cpu": {HOSTILE: HOSTILE}}))
    for folder in (evil / "evaluations" / "<b>", evil / "failures" / "<i>"):
        folder.mkdir(parents=True)
        for name in ("report.txt", "error.txt"):
            (folder / name).write_text(HOSTILE)
        (folder / "x' onerror='y.png").write_bytes(b"\x89PNG\r\n\x1a\n" + HOSTILE.encode())
    out = tmp_path / "page.html"
    for runs in ([evil], [evil, run]):
        assert main(["report", *map(str, runs), "-o", str(out)]) == 0
        reader = read(out)
        assert len(reader.scripts) == 2
        assert reader.handlers == []
        assert all(address[:1] == "#" or address[:5] == "data:" for address in reader.addresses)
        assert "\x1b" not in out.read_text()
        assert "<script>alert" not in out.read_text()


def test_sizes_are_bounded_and_links_stay_closed(run: Path, tmp_path: Path) -> None:
    folder = run / "evaluations" / "000000004000-final"
    (folder / "report.txt").write_bytes(b"y" * 10_000_000)
    (folder / "large.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(3_000_000))
    for number in range(20):
        (folder / f"more{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500_000))
    out = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    assert out.stat().st_size < 5_000_000
    assert "more are in evaluations/" in out.read_text()
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    (folder / "report.txt").unlink()
    (folder / "report.txt").symlink_to(secret)
    assert main(["report", str(run), "-o", str(out)]) == 2


def test_mistakes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "-o", "page.pdf"]) == 2
    assert "must end in .html" in capsys.readouterr().err
    assert main(["report", "nothing"]) == 2


def test_the_command_gives_the_same_recipe(tmp_path: Path) -> None:
    recipe = recipes.find("reach-short").replace(
        seed=3, algorithm__learning_rate=2e-4, policy__hidden=[32, 16]
    )
    said = command_of(recipe, tmp_path)
    assert said == (
        "etude train reach-short --seed 3 --policy.hidden 32,16 --algorithm.learning-rate 0.0002"
    )
    other = recipe.replace(name="mine")
    assert command_of(other, tmp_path / "a b") == f"etude train '{tmp_path}/a b/recipe.yaml'"


@pytest.mark.rotated
def test_a_browser_without_a_network_draws_it(run: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    out, hovered = tmp_path / "page.html", tmp_path / "hovered.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", out.read_text())
    hovered.write_text(without_policy.replace("</body>", HOVER))
    flags = ["--headless=new", "--no-sandbox", "--no-first-run", "--virtual-time-budget=2000"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    pages = []
    for path in (out, hovered):
        command = [chromium, *flags, "--dump-dom", path.as_uri()]
        pages.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    count = out.read_text().count('<figure class="chart"')
    assert count > 2
    assert f'data-drawn="{count}"' in pages[0]
    assert pages[0].count("<polyline") == count
    assert 'data-said="4000 steps: 9.5"' in pages[1]  # the return, at the end
    assert 'data-log="' in pages[1]
