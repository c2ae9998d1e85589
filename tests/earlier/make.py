"""Keep runs, a bundle and a dataset of this version for the tests of later ones.

Run `python tests/earlier/make.py tests/earlier/0.1` for each release. What it writes is never
changed, and test_earlier.py reads it with every later version (docs/about/deprecations.md).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import etude

SMALL = "--policy.hidden 8,8 --evaluation.episodes 4 --evaluation.num-envs 4"
SMALL += " --evaluation.envs-per-group 4 --evaluation.final-episodes 4 --checkpoint.keep-last 1"
REACH = "--collector.num-envs 8 --collector.envs-per-group 4 --algorithm.rollout-steps 32"
REACH += " --algorithm.minibatch-size 64 --clock.total-timesteps 768 --clock.cycles 1"
REACH += " --clock.iterations 1"
SAC = "--env.id Pendulum-v1 --collector.num-envs 2 --collector.envs-per-group 2"
SAC += " --algorithm.rollout-steps 100 --algorithm.warmup-steps 200 --algorithm.train-batches 2"
SAC += " --algorithm.batch-size 32 --algorithm.capacity 2000 --clock.total-timesteps 600"
SAC += " --clock.cycles 1 --clock.iterations 1"


def command(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "etude", *map(str, words)], check=True)


def main(out: Path) -> None:
    out.mkdir(parents=True)
    command("train", "reach-short", *SMALL.split(), *REACH.split(), "--folder", out / "reach")
    command("train", "sac", *SMALL.split(), *SAC.split(), "--folder", out / "replay")
    bundled = ("--license", "apache-2.0", "--no-film", "--no-onnx")
    command("bundle", out / "reach", "--to", out / "bundle", *bundled)
    command("data", "record", "reach", out / "dataset", "--episodes", "4", "--image-size", "0")
    expected = {
        "action": etude.load_policy(out / "reach").act(np.ones(25, np.float32)).tolist(),
        "fingerprints": {n: etude.Run(out / n).fingerprint() for n in ("reach", "replay")},
    }
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for unneeded in [*out.glob("*/events.out.*"), *out.glob("*/.lock"), *out.glob("*/evaluations")]:
        if unneeded.parent.name == "bundle":
            continue
        shutil.rmtree(unneeded) if unneeded.is_dir() else unneeded.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
