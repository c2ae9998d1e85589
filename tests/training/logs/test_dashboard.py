"""The dashboard at many sizes, with whatever a run has or lacks."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.segment import Segment

from etude.core import output
from etude.core.clock import Clock, ClockConfig, Loops
from etude.core.metrics import Best, Health
from etude.training.logs.dashboard import Above, Dashboard, TerminalConsole
from etude.training.logs.dashboard_view import draw
from log_points import METRICS, rows_like_a_run

SIZES = [(80, 24), (160, 50), (110, 30), (120, 24), (100, 60), (60, 15), (40, 10), (20, 5), (8, 3)]
SIZES += [(1, 1), (0, 0), (250, 80), (109, 80)]


def make(width: int = 80, height: int = 24, iterations: int = 24) -> Dashboard:
    console = TerminalConsole(file=io.StringIO(), force_terminal=True, width=width, height=height)
    folder, health = "runs/reach/2026-01-01-000000-s0", Health(METRICS, iterations)
    facts = [("seed", "3"), ("changed", "clock.iterations 2")]
    return Dashboard("reach", folder, health, console, facts)


def clock_at(iterations: int, total: int = 23) -> Clock:
    """2 iterations a cycle, 4 cycles an epoch; the last of both are short."""
    config = ClockConfig(total_timesteps=256 * total, cycles=4, iterations=2)
    clock = Clock(Loops.of(config, 256, 16))
    for _ in range(iterations):
        clock.advance(16, 3)
    return clock


def text_of(dashboard: Dashboard, width: int, height: int) -> list[str]:
    """What is drawn, after checking that it fits."""
    lines = draw(dashboard._view(), width, height)
    assert len(lines) <= height
    assert all(Segment.get_line_length(line) == width for line in lines)
    return ["".join(piece.text for piece in line) for line in lines]


def rows_with_trouble() -> list[dict[str, Any]]:
    rows = rows_like_a_run(12)
    rows[3] |= {"rollout/ep_rew_mean": math.nan, "train/approx_kl": None, "time/fps": math.inf}
    for name in ("rollout/success_rate", "reward/effort", "time/collect", "system/cpu_cores"):
        del rows[5][name]
    for row in rows[-4:]:
        row |= {"train/approx_kl": 0.5, "train/explained_variance": -2.0, "train/value_loss": 3.0}
        row |= {"rollout/ep_rew_mean": 0.0, "rollout/success_rate": 0.0}
    return rows


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_at_every_size(width: int, height: int) -> None:
    dashboard = make(width, height)
    text_of(dashboard, width, height)  # before the run says anything
    dashboard.follow(clock_at(0))
    text_of(dashboard, width, height)
    rows = rows_with_trouble()
    for i, row in enumerate(rows):
        dashboard.write(row)
        dashboard.follow(clock_at(2 * i))
        dashboard.batch()
        dashboard.activity("train")
        dashboard._noted = ["A message that is longer than many terminals are wide. " * 3] * i
        text_of(dashboard, width, height)
    for row in ({}, {"timesteps": None, "note": "text"}, {"eval/mean_reward": -1e30}):
        dashboard.write(row)
        text_of(dashboard, width, height)


def test_small_terminals_have_what_matters() -> None:
    dashboard = make()
    dashboard.follow(clock_at(13))
    for row in rows_with_trouble():
        dashboard.write(row)
    for _ in range(4):
        dashboard.batch()
    dashboard.activity("train")
    lines = text_of(dashboard, 80, 23)
    text = "\n".join(lines)
    assert "reach" in lines[0]
    assert "learning" in lines[0]
    for name in ("epoch", "cycle", "iteration", "batch", "return", "success", "eval success"):
        assert any(line.startswith(name) for line in lines), name
    assert "3,328 of 5,888 steps · 57%" in text
    assert "physics 40%" in text
    assert "! KL too high" in text
    assert "value function explains nothing" in text
    levels = [line.split()[-1] for line in lines if "━" in line or "──" in line[10:14]]
    assert {"1/3", "2/4", "1/2", "4/16"} <= set(levels)


def test_large_terminals_have_everything() -> None:
    dashboard = make()
    dashboard.follow(clock_at(13))
    dashboard._health.best = Best(1.0, 2.0, 6144)
    for row in rows_with_trouble():
        dashboard.write(row)
    dashboard._noted = ["W&B: here"]
    text = "\n".join(text_of(dashboard, 160, 49))
    for words in (
        "· progress",
        "· effort",
        "explained var.",
        "environment",
        "processor 1.50 cores",
        "memory 300 MiB",
        "algorithm.learning_rate",
        "W&B: here",
        "runs/reach/2026-01-01-000000-s0",
        "eval return",
        "value loss",
        "std",
        "steps/s",
        "eval success 100.0% (best 100.0% at 6,144)",
        "seed     3",
        "clock.iterations 2",
        "last rows",
        "6,144 steps",
        "6.00┤",
    ):
        assert words in text, words
    empty = [line for line in text.splitlines() if not line.replace("│", "").strip()]
    assert len(empty) < 3


def test_it_says_how_far_a_long_wait_is_and_what_came_on_standard_error() -> None:
    dashboard = make()
    dashboard.follow(clock_at(13))
    dashboard.activity("test")
    with output.waiting("evaluating", 20, "episodes") as wait:
        wait.done = 12
        assert dashboard._view().state == "evaluating 12 of 20 episodes"
        wait.start -= 61
        assert dashboard._view().state == "evaluating 12 of 20 episodes, 61 s"
    assert dashboard._view().state == "evaluating"
    above = Above(dashboard._console, io.StringIO(), dashboard._note)
    print("SIGINT: the run is saved at the end of this iteration", file=above)
    assert "SIGINT: the run is saved" in "\n".join(text_of(dashboard, 80, 23))


def test_the_last_short_epoch_and_the_end() -> None:
    dashboard = make()
    for done, counts in ((22, ["2/3", "3/4", "0/1", "0/16"]), (23, ["3/3", "4/4", "1/1", "16/16"])):
        dashboard.follow(clock_at(done))
        view = dashboard._view()
        assert [f"{level.done}/{level.total}" for level in view.levels] == counts
        assert all(0.0 <= level.share <= 1.0 for level in view.levels)
    assert view.left is None


def test_time_that_nobody_claims_is_other() -> None:
    dashboard = make()
    for row in rows_like_a_run(2):
        dashboard.write(row)
    seconds = dashboard._view().seconds
    assert seconds["learning"] == pytest.approx(0.2)
    assert seconds["other"] == pytest.approx(2 * (0.5 - 0.46))
    assert sum(seconds.values()) == pytest.approx(1.0)


def test_messages_wait_for_the_end_and_a_resume_shows_the_history() -> None:
    dashboard = make()
    rows = rows_like_a_run(6)
    dashboard.say("[not markup] before")
    dashboard.begin(rows[:4])
    dashboard.follow(clock_at(8))
    dashboard.say("while it is up")
    for row in rows[4:]:
        dashboard.write(row)
    assert len(dashboard._curves["rollout/ep_rew_mean"].points) == 6
    # What was elapsed before the resume went to nothing of this process.
    assert dashboard._view().seconds["other"] == pytest.approx(2 * (0.5 - 0.46))
    dashboard.close()
    dashboard.close()
    stream = dashboard._console.file
    assert isinstance(stream, io.StringIO)
    shown = stream.getvalue()
    assert shown.startswith("[not markup] before\n")
    assert shown.endswith("while it is up\n")
    assert "stopped" in shown
    assert "\x1b[?" not in shown  # neither hides the cursor nor takes the screen
    assert 0.0 < dashboard.cost < 1.0
