"""docs/benchmarks.md and its pictures, from benchmarks/results.json.

    python benchmarks/page.py

Nothing on the page is written by hand but the text in this file.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.run import PEERS, RESULTS, is_older, is_ours, read, why_older  # isort: skip
from benchmarks.tasks import TASKS, Task  # isort: skip
from gates.pages.page_figures import OLDER  # isort: skip
from etude.evaluate.charts import COLORS, FAINT, INK, drawn, steps_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
Record = dict[str, Any]
_SOLID, _DASHED, _DOTTED = "-", (0, (5, 2)), (0, (1, 1))
LINES: dict[str, tuple[str, Any]] = {
    "etude": (COLORS[0], _SOLID),
    "etude_recipe": (COLORS[0], _DASHED),
    "stable_baselines3": (COLORS[1], _SOLID),
    "stable_baselines3_processes": (COLORS[1], _DASHED),
    "stable_baselines3_eight": (COLORS[1], _DOTTED),
    "rsl_rl": (COLORS[2], _SOLID),
    "cleanrl_style": (COLORS[3], _SOLID),
    "sbx": (COLORS[4], _SOLID),
    "skrl": (COLORS[5], _SOLID),
    "sample_factory": (COLORS[6], _SOLID),
    "torchrl": (COLORS[7], _SOLID),
    "pufferlib": (COLORS[3], _DASHED),
    "mjbatch": (COLORS[2], _DASHED),
    "unilab": (COLORS[4], _DASHED),
}
"""{peer: colour and style of its line}, the same in all charts."""
SHOWN = {
    **{"halfcheetah": "HalfCheetah-v5", "ant": "Ant-v5", "etude": "Etude"},
    **{"cleanrl_style": "CleanRL style", "stable_baselines3": "SB3"},
    **{"stable_baselines3_processes": "SB3, processes"},
}
"""{task or peer: its name in the chart, where there is little room}."""
_CODE = re.compile(r"\b(?:[A-Z]+(?:_[A-Z]+)+|\w+=\w+)\b")
SECONDS_PICTURE = "benchmark-seconds.svg"
FEW, ROUNDS = "‡", 3
"""Mark of a figure of fewer than `ROUNDS` runs, which shows nothing beside another."""
_PARTS = {"left alone": FAINT, "killed": COLORS[0], "resumed": COLORS[1]}
"""{part of a kill: its colour}."""

HEAD = """# Beside other libraries

<!-- Made by `python benchmarks/page.py` from benchmarks/results.json: do not edit. -->

Each library trains the same task with the same settings on the same machine, one run at a time.
Nothing here says which library is better in general: two cores, small networks, five tasks. [The
rules](#rules) are below the figures.

"""
RULES = """## Rules

The libraries run in turns, each in a virtual environment of its own with the versions of
`benchmarks/requirements`.

- **Equal for all on a task:** hidden layers and activation, steps between two updates, minibatch,
  passes over a rollout (PPO) or batches per update (SAC), learning rate, discount; so equal
  gradient samples per step. Policy and value function read the same observations.
- **Each library's own:** how environments are stepped, normalisation, initialisation, logging;
  [how each was run](#how-each-was-run) says what was used. pick-place and walk-go1 are stepped by
  Etude's batch engine for all of them (`etude.make_vec`), so that what differs there is not the
  physics; `stable_baselines3_processes` and `stable_baselines3_eight` have 8 single environments of
  pick-place, in 8 processes and in one. Libraries without workers of their own step Gymnasium's
  environments one after the other in one process; the lines of stable-baselines3 show what a
  process for each would change.
- `etude_recipe` has the settings of Etude's own recipe, except that the run has no end, so its
  learning rate stays constant; `cleanrl_style` is one file of ours in plain torch.
- Etude runs HalfCheetah-v5 and Ant-v5 on its batch engine. Its runner uses the faster of two
  ways to spread environments over threads; the other runners were not tuned like this. The contact
  forces that the Ant observes are those before the last physics step; Gymnasium's are what the last
  stage of the integrator left behind.
- Peers with an engine of their own have a task like walk-go1, and settings of their own. Their
  scores mean something else and are left out.
- Figures are medians over runs; a run that never reached the score counts as the slowest. ‡ marks
  figures of fewer than three runs, which show nothing beside others: `benchmarks/run.py` makes
  three rounds, in which the libraries take turns.
- **steps/s** is without imports, compilation, warm-up and the first fifth of a run. **ms** are what
  1,000 steps take: in the call that steps all environments, and in acting, learning, logs and
  checkpoints. They are empty if a library's workers do not report them. **Memory** is the largest
  sum over a run's processes, a shared page counted once. **Score** is the mean over the newest 100
  training episodes, exploration included; seconds to it count from the start of the process.
  Columns about it are empty where it has not been measured yet. † marks a line of Etude
  where an iteration of today's code computes other bits or makes other calls of NumPy, torch and
  MuJoCo than when it was measured, or where that is not known; the end of this page says which.

To repeat it, or to add a peer (one file in `benchmarks/runners`):

    python benchmarks/prepare.py --all
    python benchmarks/run.py
    python benchmarks/page.py

"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def good(runs: Sequence[Record]) -> list[Record]:
    return [run for run in runs if not run["error"] and not run.get("not_offered")]


def timed(runs: Sequence[Record], task: str) -> list[Record]:
    """The runs of a task's table. Killed ones have a table of their own: they may be of another
    length and day."""
    return [run for run in runs if run["task"] == task and run["measure"] != "kill"]


def speed_of(runs: Sequence[Record]) -> float:
    """Median steps/s over runs; 0 of none."""
    return statistics.median([run["steps_per_second"] for run in runs] or [0.0])


def fault(error: str) -> str:
    """The line of an error that says what went wrong, for a cell of a table."""
    lines = error.strip().splitlines()
    told = [line.strip() for line in lines if "Error: " in line] or lines
    return told[-1][:300].replace("|", "\\|")


def settings(task: Task) -> str:
    sizes = "-".join(map(str, task.hidden))
    what = f"{task.algorithm.upper()}, {sizes} {task.activation}, {task.num_envs} environments, "
    what += f"{task.rollout:,} steps between updates, minibatch {task.minibatch_size:,}, "
    what += f"{task.samples_per_step:g} gradient samples per step; score: {task.score} of "
    return what + (f"{task.target:.0%}" if task.score == "success" else f"{task.target:,.0f}")


def profiled(profile: Record) -> str:
    """Where the time of a gradient step of Etude's goes."""
    whole, inside = profile["milliseconds"], profile["products_milliseconds"]
    older = OLDER if is_older(profile) else ""
    return (
        f"A gradient step of Etude's takes {whole:.1f} ms on one core{older}: {inside:.1f} ms in "
        f"{profile['products']:.0f} matrix products, the rest in drawing the batch and in "
        "all other operations (`benchmarks/update_profile.py`). The update of sbx is compiled by "
        "JAX.\n\n"
    )


def section(task: Task, runs: list[Record], profile: Record | None = None) -> str:
    """A task's table, notes and picture."""
    by_peer = defaultdict(list)
    for run in timed(runs, task.name):
        by_peer[run["peer"]].append(run)
    if not by_peer:
        return f"## {task.name}\n\n{settings(task)}. Not measured yet.\n"
    rows, notes, absent = [], [], []
    for peer in sorted(by_peer, key=lambda p: -speed_of(good(by_peer[p]))):
        offered = next((r["not_offered"] for r in by_peer[peer] if r.get("not_offered")), None)
        fine = good(by_peer[peer])
        if offered and not fine:
            absent.append(f"{peer} ({offered})")
            continue
        if not fine:
            rows.append([_named(peer, by_peer[peer]), "failed", *[""] * 7])
        else:
            rows.append(figures(peer, fine))
        for run in by_peer[peer]:
            if run["error"]:
                name = f"{peer}, {run['measure']}, seed {run['seed']}"
                notes.append(f"- {name} failed: `{fault(run['error'])}`")
    head = ["library", "seconds to the score", "steps to it", "reached", "steps/s"]
    head += ["ms in environments", "ms in all else", "memory"]
    text = f"## {task.name}\n\n{settings(task)}.\n\n{table(head, rows)}\n"
    text += profiled({**profile, "peer": "etude", "task": task.name}) if profile else ""
    if absent:
        text += f"Not measured: {', '.join(absent)}.\n"
    text += "\n".join(["", *notes]) if notes else ""
    if curves(task, runs):
        text += f"\n\n![Score over time on {task.name}](images/benchmark-{task.name}.svg)"
    return text + "\n"


def notes_of(runs: list[Record]) -> str:
    """How each peer was run."""
    said = {run["peer"]: run["note"] for run in good(runs) if run["note"]}
    if not said:
        return ""
    lines = [f"- {peer}: {note}." for peer, note in sorted(said.items())]
    return "\n## How each was run\n\n" + "\n".join(lines) + "\n"


def _named(peer: str, runs: Sequence[Record]) -> str:
    """A peer with its version."""
    version = next((r["version"] for r in runs if r.get("version")), "") or ""
    return peer if version in ("", "here") else f"{peer} {version}"


def figures(peer: str, runs: list[Record]) -> list[str]:
    """One row: medians over runs."""
    memory = max(run["peak_memory"] for run in runs) / 2**20
    name = _named(peer, runs) + (OLDER if any(map(is_older, runs)) else "")
    few = FEW if len(runs) < ROUNDS else ""
    speed = [f"{speed_of(runs):,.0f}{few}", *spent(runs), f"{memory:,.0f} MiB"]
    scored = [run for run in runs if run["measure"] == "score"]
    if not scored or runs[0]["own_engine"]:
        return [name, "", "", "", *speed]
    reached = f"{sum(run['reached'] is not None for run in scored)} of {len(scored)}"
    return [name, *map(_or_never, to_score(scored)), reached, *speed]


def to_score(scored: Sequence[Record]) -> tuple[float, float]:
    """Median seconds and steps to the score; a run that never reached it took forever."""
    reached = [run["reached"] or (math.inf, math.inf) for run in scored]
    seconds, steps = (statistics.median(each[i] for each in reached) for i in (0, 1))
    return seconds, steps


def _or_never(value: float) -> str:
    return f"{value:,.0f}" if value < math.inf else "-"


def seconds_of(scored: Sequence[Record]) -> tuple[float, float]:
    """Median seconds to the score, and that if runs without it had reached it at their end."""
    least = [run["reached"][0] if run["reached"] else run["seconds"] for run in scored]
    return to_score(scored)[0], statistics.median(least)


def _seconds(scored: Sequence[Record]) -> str:
    seconds, least = seconds_of(scored)
    return f"{seconds:,.0f}" if seconds < math.inf else f"over {least:,.0f}"


class Column(NamedTuple):
    """A figure by which Etude stands beside the others."""

    measures: tuple[str, ...]
    of: Callable[[list[Record]], Any]
    told: Callable[[list[Record]], str]
    best: Callable[..., str]


SPEED = Column(("speed", "score"), speed_of, lambda runs: f"{speed_of(runs):,.0f}", max)
SECONDS = Column(("score",), seconds_of, _seconds, min)


def beside(runs: Sequence[Record], task: str, column: Column) -> tuple[str, str]:
    """A figure of Etude, and that of the best other peer with its name; "" where either was not
    measured. Peers with an engine of their own do not count."""
    found = defaultdict(list)
    for run in good(timed(runs, task)):
        if run["measure"] in column.measures and not run["own_engine"]:
            found[run["peer"]].append(run)
    others = {peer: column.of(ran) for peer, ran in found.items() if not is_ours(peer)}
    if "etude" not in found or not others:
        return "", ""
    best = column.best(others, key=others.__getitem__)
    older = OLDER if any(map(is_older, found["etude"])) else ""
    few = {peer: FEW if len(found[peer]) < ROUNDS else "" for peer in ("etude", best)}
    ours, theirs = (column.told(found[peer]) + few[peer] for peer in few)
    return ours + older, f"{theirs} ({best})"


def summary(runs: Sequence[Record]) -> str:
    """Etude beside the best other library on each task, with the same settings."""
    rows = [[task, *beside(runs, task, SECONDS), *beside(runs, task, SPEED)] for task in TASKS]
    rows = [row for row in rows if any(row[1:])]
    if not rows:
        return ""
    head = ["task", "seconds to the score: Etude", "the fastest other", "steps/s: Etude"]
    told = (
        "Etude, with the settings that all libraries share, beside the fastest other library. "
        '"Over": most runs had not reached the score when their time was up. Empty: not '
        "measured.\n\n"
    )
    shown = f"![Seconds to a score, by library and task](images/{SECONDS_PICTURE})\n\n"
    shown = shown if scored_peers(runs) else ""
    return f"## In short\n\n{shown}{told}{table([*head, 'the fastest other'], rows)}\n"


def spread(runs: Sequence[Record]) -> str:
    """A sentence about the ratio between runs that should be equally fast; "" if none is
    repeated."""
    speeds = defaultdict(list)
    for task in TASKS:
        for run in good(timed(runs, task)):
            speeds[run["peer"], task].append(run["steps_per_second"])
    ratios = {key: max(each) / min(each) for key, each in speeds.items() if len(each) > 1}
    if not ratios:
        return ""
    peer, task = widest = max(ratios, key=ratios.__getitem__)
    typical = statistics.median(ratios.values())
    return (
        " Of one library's runs on one task the fastest made"
        f" {typical:.2g} times the steps/s of the slowest (median), and up to"
        f" {ratios[widest]:.2g} times ({peer} on {task}): a smaller difference between two"
        " libraries may be chance, and not all have as many runs, nor at the same hour."
    )


def spent(runs: Sequence[Record]) -> list[str]:
    """Milliseconds that 1,000 steps take in environments and in all else, medians over runs."""
    told = [run for run in runs if run.get("environment_share") is not None]
    if not told:
        return ["", ""]
    whole = [1e6 / run["steps_per_second"] for run in told]
    inside = [w * run["environment_share"] for w, run in zip(whole, told, strict=True)]
    rest = [w - i for w, i in zip(whole, inside, strict=True)]
    return [f"{statistics.median(each):,.0f}" for each in (inside, rest)]


def marks(runs: list[Record]) -> str:
    """Why lines of Etude are marked."""
    lines = {
        f"- {run['peer']} on {run['task']}, measured at {run['commit'][:8]}: {why}.\n"
        for run in good(runs)
        if (why := why_older(run))
    }
    return f"\n## Why lines are marked\n\n{''.join(sorted(lines))}" if lines else ""


def kills(runs: list[Record]) -> str:
    """Cost of a SIGKILL at half time for each peer."""
    rows = []
    for run in (run for run in runs if run["measure"] == "kill"):
        killed = run.get("killed")
        if killed is None:
            offered = run.get("not_offered")
            why = f"not tried: {offered}" if offered else f"failed: `{fault(run['error'])}`"
            rows.append([run["task"], run["peer"], why, "", "", "", ""])
            continue
        differs = killed["largest_difference"]
        rows.append(
            [
                run["task"],
                run["peer"],
                _CODE.sub(r"`\g<0>`", run["resumes"]),
                f"{killed['killed_at']:,}",
                "-" if killed["went_on_from"] is None else f"{killed['went_on_from']:,}",
                "-" if differs is None else f"{differs:.3g}",
                {True: "yes", False: "no", None: "not claimed"}[killed["bit_equal"]],
            ]
        )
    if not rows:
        return "## After kill -9 at half time\n\nNot measured yet.\n"
    head = ["task", "peer", "how it resumes", "killed at", "went on from"]
    head += ["largest difference of the score", "bit-equal"]
    told = (
        "The score of the resumed run beside that of the untouched one, at equal steps. Both are "
        "means over 100 episodes of training; one pair of runs shows whether they diverge, but not "
        "how far they usually do.\n\n"
    )
    text = f"## After kill -9 at half time\n\n{told}{table(head, rows)}"
    for task in TASKS.values():
        if resumed(task, runs):
            text += (
                f"\n![Killed and resumed on {task.name}](images/benchmark-kill-{task.name}.svg)\n"
            )
    return text


def resumed(task: Task, runs: list[Record]) -> list[Record]:
    """The runs of a task that were killed and went on."""
    ended = [run for run in good(runs) if (run["measure"], run["task"]) == ("kill", task.name)]
    return [run for run in ended if run["killed"] and run["killed"]["curve_after"]]


def kill_picture(task: Task, found: list[Record]) -> bytes:
    """Scores over steps, a panel for each peer: left alone, killed, resumed."""
    place = 3 if task.score == "success" else 2
    columns = min(len(found), 2)
    rows = -(-len(found) // columns)

    def draw(figure: Any) -> None:
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        for panel, run in zip_longest(panels, found):
            if run is None:
                panel.set_axis_off()
                continue
            panel.set_title(run["peer"])
            panel.xaxis.set_major_formatter(steps_text)
            panel.locator_params(axis="x", nbins=4)
            lines = (run["curve"], run["killed"]["curve_before"], run["killed"]["curve_after"])
            for line, (name, color) in zip(lines, _PARTS.items(), strict=True):
                points = [(p[1], p[place]) for p in line if p[place] is not None]
                label = name if run is found[0] else None
                panel.plot(*zip(*points, strict=True), color=color, label=label)
        figure.legend(loc="outside upper left", ncols=len(_PARTS))

    return drawn(draw, 3.2 * columns, 2.2 * rows + 0.3)


def curves(task: Task, runs: list[Record]) -> dict[str, list[list[tuple[float, float]]]]:
    """{peer: curves of (seconds, score)} of the runs that were trained to a score."""
    place = 3 if task.score == "success" else 2
    found: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for run in good(runs):
        if (run["task"], run["measure"]) != (task.name, "score") or run["own_engine"]:
            continue
        points = [(p[0], p[place]) for p in run["curve"] if p[place] is not None]
        if len(points) > 1:
            found[run["peer"]].append(points)
    return found


def picture(task: Task, found: dict[str, list[list[tuple[float, float]]]]) -> bytes:
    """Scores over seconds, a line per run in the colour of its library."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.set_title(f"{task.name}: {task.score}")
        axes.set_xlabel("seconds")
        axes.axhline(task.target, color=FAINT, linewidth=1)
        for peer in (peer for peer in LINES if peer in found):
            color, style = LINES[peer]
            for line in found[peer]:
                label = peer if line is found[peer][0] else None
                axes.plot(*zip(*line, strict=True), color=color, linestyle=style, label=label)
        axes.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=3)

    return drawn(draw, 6.4, 4.4)


def scored_peers(runs: Sequence[Record]) -> dict[str, dict[str, list[Record]]]:
    """{task: {peer: runs that were trained to a score}}, the fastest first; only with the settings
    and environments that all libraries share."""
    found: dict[str, dict[str, list[Record]]] = {}
    for run in good(runs):
        if run["measure"] == "score" and not run["own_engine"] and run["peer"] != "etude_recipe":
            found.setdefault(run["task"], {}).setdefault(run["peer"], []).append(run)
    return {
        task: dict(sorted(found[task].items(), key=lambda item: seconds_of(item[1])))
        for task in TASKS
        if task in found
    }


def seconds_picture(found: dict[str, dict[str, list[Record]]]) -> bytes:
    """Seconds to the score as bars, a panel for each task; bars of runs that did not reach it are
    pale and as long as the runs."""
    rows = -(-len(found) // 2)
    heights = [max(map(len, [*found.values()][2 * row : 2 * row + 2])) + 1.3 for row in range(rows)]

    def draw(figure: Any) -> None:
        title = "Seconds to a score: PPO, the same settings, 2 CPU cores"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.get_layout_engine().set(h_pad=0.1, hspace=0.06)
        panels = figure.subplots(rows, 2, squeeze=False, height_ratios=heights)
        for axes in panels.flat[len(found) :]:
            axes.set_axis_off()
        for axes, (task, peers), height in zip(
            panels.flat, found.items(), (h for h in heights for _ in range(2)), strict=False
        ):
            wanted = TASKS[task].target
            score = f"{wanted:.0%}" if TASKS[task].score == "success" else f"{wanted:,.0f}"
            axes.set_title(f"{SHOWN.get(task, task)}: {TASKS[task].score} {score}")
            longest = max(seconds_of(scored)[1] for scored in peers.values())
            for place, (peer, scored) in enumerate(peers.items()):
                length = seconds_of(scored)[1]
                alpha = 1.0 if seconds_of(scored)[0] < math.inf else 0.4
                axes.barh(place, length, 0.72, color=LINES[peer][0], alpha=alpha)
                older = OLDER if any(map(is_older, scored)) else ""
                text = f"{_seconds(scored)}{older}"
                axes.text(length + 0.02 * longest, place, text, va="center", ha="left")
            axes.set_yticks(range(len(peers)), [SHOWN.get(peer, peer) for peer in peers])
            axes.tick_params(axis="y", labelcolor=INK)
            axes.set_ylim(height - 1.3 - 0.4, -0.6)  # bars are as thick in all panels
            axes.set_xlim(0, 1.32 * longest)
            axes.set_xticks([])
            axes.grid(False)
            axes.spines.bottom.set_visible(False)

    return drawn(draw, 5.8, 0.26 * sum(heights) + 0.7)


def render(results: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by file name."""
    runs, text = results["runs"], HEAD
    failed = {peer: fault for peer, fault in results["installs"].items() if fault}
    text += summary(runs)
    for task in TASKS.values():
        text += section(task, runs, results.get("profiles", {}).get(task.name)) + "\n"
    text += f"{kills(runs)}\n{RULES}"
    if runs:
        dates = sorted(run["date"][:10] for run in runs)
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        told = f"Measured {days} on {runs[-1]['machine'].split(', load')[0]}; "
        text += told + f"commits {', '.join(sorted({run['commit'] for run in runs}))}.\n\n"
        busy = max(run["busy_before"] for run in runs)
        text += f"Other work used at most {busy:.0%} of the cores when a run began.{spread(runs)}\n"
    text += notes_of(runs) + marks(runs)
    if failed:
        text += "\n## What does not install\n\n"
        for peer in (p for p in PEERS if p in failed):
            text += f"- {peer}: `{fault(failed[peer])}`\n"
    drawn = {}
    if peers := scored_peers(runs):
        drawn[SECONDS_PICTURE] = seconds_picture(peers)
    for task in TASKS.values():
        found = curves(task, runs)
        if found:
            drawn[f"benchmark-{task.name}.svg"] = picture(task, found)
        if resumed(task, runs):
            drawn[f"benchmark-kill-{task.name}.svg"] = kill_picture(task, resumed(task, runs))
    return text, drawn


def main() -> int:
    page, drawn = render(read(RESULTS))
    PAGE.write_text(page)
    for old in IMAGES.glob("benchmark-*.svg"):
        old.unlink()
    for name, image in drawn.items():
        (IMAGES / name).write_bytes(image)
    print(f"{PAGE.relative_to(ROOT)}: {len(drawn)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
