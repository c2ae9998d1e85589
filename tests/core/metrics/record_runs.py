"""Record runs with known verdicts again: `python tests/core/metrics/record_runs.py [NAME ...]`.

Each is a real training of a minute or less. What its log rows hold of the metrics that health
reads is kept in tests/metrics/runs/NAME.jsonl, and test_recorded_runs.py says what must be said.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path

from etude.cli.main import main

FOLDER = Path(__file__).parent / "runs"
CARTPOLE = "ppo --env.id CartPole-v1 --evaluation.final-episodes 0 --clock.iterations 2"
PENDULUM = "--env.id Pendulum-v1 --evaluation.final-episodes 0 --policy.hidden 64 64"

LARGE_STEPS = "--algorithm.final-learning-rate 1 --algorithm.max-grad-norm 10"
BASE = f"{CARTPOLE} --clock.total-timesteps 40960"
"""The run whose policy {base} is."""

COMMANDS = {
    "solved": f"{CARTPOLE} --clock.total-timesteps 122880",
    "solved-other-seed": f"{CARTPOLE} --clock.total-timesteps 122880 --seed 1",
    "solved-from-the-start": f"{CARTPOLE} --clock.total-timesteps 40960 --from {{base}}",
    "solved-reach": "reach --evaluation.final-episodes 0",
    "solved-roughly": f"{CARTPOLE} --clock.total-timesteps 61440 {LARGE_STEPS} "
    "--algorithm.learning-rate 0.01 --algorithm.update-epochs 20",
    "climbing": f"{CARTPOLE} --clock.total-timesteps 49152 --algorithm.learning-rate 3e-4",
    "climbing-slowly": f"{CARTPOLE} --clock.total-timesteps 61440 --policy.hidden 1",
    "climbing-late": "reach --evaluation.final-episodes 0 --clock.total-timesteps 160000 "
    "--env.speed 0.04",
    "exploding-kl": f"{CARTPOLE} --clock.total-timesteps 81920 {LARGE_STEPS} "
    "--algorithm.learning-rate 0.02 --algorithm.update-epochs 20",
    "exploding-kl-other-seed": f"{CARTPOLE} --clock.total-timesteps 81920 {LARGE_STEPS} "
    "--algorithm.learning-rate 0.03 --algorithm.clip 0.4 --seed 2",
    "collapse": f"{CARTPOLE} --clock.total-timesteps 40960 {LARGE_STEPS} --algorithm.gamma 0.5 "
    "--algorithm.learning-rate 0.004 --algorithm.clip 0.9 --algorithm.update-epochs 30 "
    "--evaluation.every '1 cycle' --from {base}",
    "frozen": f"{CARTPOLE} --clock.total-timesteps 40960 --algorithm.learning-rate 0.1 "
    "--algorithm.max-grad-norm 100",
    "dead-critic": f"{CARTPOLE} --clock.total-timesteps 49152 --algorithm.value-coef 0",
    "no-progress": f"{CARTPOLE} --clock.total-timesteps 40960 --algorithm.learning-rate 1e-7",
    "plateau": "reach --evaluation.final-episodes 0 --clock.total-timesteps 400000 "
    "--env.max-episode-steps 9",
    "diverging": f"td3 {PENDULUM} --clock.total-timesteps 8000 --algorithm.learning-rate 0.01 "
    "--algorithm.batch-size 32 --algorithm.polyak 0 --algorithm.gamma 1",
}
KEPT = ("rollout/", "reward/", "eval/mean_", "eval/std_", "eval/success", "eval/episodes")
KEPT += ("train/approx", "train/clip", "train/expl", "train/std", "train/value", "train/entropy")
KEPT += ("train/q_mean", "train/critic", "train/learning_rate")


def record(name: str) -> None:
    """Train a run and keep its rows, with five digits of what health reads."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = COMMANDS[name]
        if "{base}" in command:
            base = Path(folder) / "base"
            assert main(["train", *BASE.split(), "--folder", str(base)]) == 0
            command = command.replace("{base}", str(base))
        assert main(["train", *shlex.split(command), "--folder", str(run)]) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {
            column: float(f"{value:.5g}") if column.startswith(KEPT) else value
            for column, value in row.items()
            if column in ("iterations", "timesteps")
            or (column.startswith(KEPT) and value is not None)
        }
        for row in rows
    ]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    (FOLDER / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or COMMANDS:
        record(wanted)
