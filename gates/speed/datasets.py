"""Large datasets: memory of an import, time of a draw, and reading from the disk.

    python -m gates.speed.datasets [--steps 10000000] [--episodes 1000000] [--pictures 24000]

- An import of `--steps` steps of states, as a command: its resident memory and that of the process
  that reads the file are at most 2 GiB together.
- A minibatch of a dataset of `--episodes` episodes takes at most 20 % longer to draw than one of a
  hundredth of them, of the same length.
- Images of which a third may be in memory: as soon as a third has been read, all pages are dropped
  from the cache. Minibatches of 32 are drawn during a computation with the one before, with and
  without a thread that draws ahead. Both rates are figures. (The memory limit of a control group
  would do the same, but needs permissions.)

Files are in a temporary folder, 3 GB at full size.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from etude.core.contracts import ArraySpec
from etude.data.importing import finish, new_store
from etude.data.store.episodes import EpisodeStore
from etude.data.store.labels import Labels
from etude.data.store.views import EpisodesOf
from etude.rl.sampling import ahead
from gates.lib.command import CommandFailed, started
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GIB = 1 << 30
MOST_BYTES, MOST_GROWTH = 2 * GIB, 0.20
BATCH, PICTURES_BATCH = 256, 32
IMPORT = """
import json, resource, sys
from etude.cli.main import main
code = main(["data", "import", *sys.argv[1:], "--json"])
processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
print(json.dumps([resource.getrusage(which).ru_maxrss * 1024 for which in processes]))
sys.exit(code)
"""


def write_states(path: Path, num_steps: int) -> None:
    """Write a robomimic file: episodes of 1,000 steps, states [8] and actions [2]."""
    rng = np.random.default_rng(0)
    length = min(1000, num_steps)
    with h5py.File(path, "w") as file:
        file.create_group("data")
        for number in range(num_steps // length):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = rng.uniform(-1, 1, (length, 2)).astype(np.float32)
            demo["obs/state"] = demo["next_obs/state"] = rng.normal(size=(length, 8)).astype("f4")
            demo["rewards"] = demo["dones"] = np.eye(1, length, length - 1, dtype=np.uint8)[0]


def import_bytes(folder: Path, num_steps: int) -> tuple[int, float]:
    """Import `steps` steps; return the peak of its memory in bytes, and its seconds."""
    source = folder / "states.hdf5"
    write_states(source, num_steps)
    begin = time.perf_counter()
    command = [sys.executable, "-c", IMPORT, str(source), str(folder / "states")]
    with started(command, stdout=subprocess.PIPE) as process:
        output = process.communicate()[0]
    if process.returncode:
        raise CommandFailed(f"the import ended with {process.returncode}")
    return sum(json.loads(output.splitlines()[-1])), time.perf_counter() - begin


def make_episodes(path: Path, num_episodes: int, length: int = 10) -> EpisodesOf:
    """Make a dataset of `episodes` episodes of states."""
    fields = {"obs/state": ArraySpec((8,), "float32"), "actions": ArraySpec((2,), "float32")}
    rng, labels = np.random.default_rng(0), Labels()
    obs = {"state": rng.normal(size=(length + 1, 8)).astype(np.float32)}
    actions, rewards = np.zeros((length, 2), np.float32), np.zeros(length, np.float32)
    with new_store(path, fields, length) as store:
        for number in range(num_episodes):
            store.append_episode(obs, actions, rewards, True)
            labels.add(str(number))
        done = finish(store, {}, labels)
    return EpisodesOf(done, np.arange(done.num_episodes))


def growth(folder: Path, num_episodes: int, draws: int) -> float:
    """Relative increase of the time of a minibatch from a hundredth of the episodes to all."""
    few = make_episodes(folder / "few", num_episodes // 100)
    many = make_episodes(folder / "many", num_episodes)
    taken: dict[int, list[float]] = {0: [], 1: []}
    generators = [np.random.default_rng(1), np.random.default_rng(1)]
    for view, generator in zip((few, many), generators, strict=True):
        view.sample_transitions(generator, 100 * BATCH)  # check and map all blocks
    for _ in range(draws):  # in turns, so that other work disturbs both
        for i, view in enumerate((few, many)):
            begin = time.perf_counter()
            view.sample_transitions(generators[i], BATCH)
            taken[i].append(time.perf_counter() - begin)
    medians = [float(np.median(taken[i])) for i in (0, 1)]
    print(f"a minibatch of {BATCH}: {medians[0] * 1e6:.0f} us, {medians[1] * 1e6:.0f} us")
    return medians[1] / medians[0] - 1.0


def make_pictures(path: Path, num_steps: int) -> EpisodesOf:
    """Make a dataset: episodes of 100 steps with images of 128 pixels of noise."""
    fields = {
        "obs/image": ArraySpec((128, 128, 3), "uint8"),
        "actions": ArraySpec((7,), "float32"),
    }
    rng, labels, length = np.random.default_rng(0), Labels(), 100
    with new_store(path, fields, length) as store:
        for number in range(max(1, num_steps // length)):
            obs = {"image": rng.integers(0, 256, (length + 1, 128, 128, 3), np.uint8)}
            actions = np.zeros((length, 7), np.float32)
            store.append_episode(obs, actions, np.zeros(length, np.float32), True)
            labels.add(str(number))
        done = finish(store, {}, labels)
    return EpisodesOf(done, np.arange(done.num_episodes))


def forget(store: EpisodeStore) -> None:
    """Drop the pages of a dataset from this process and from the system's cache."""
    for log in store._logs.values():
        for pages, _ in log._maps.values():
            pages.madvise(mmap.MADV_DONTNEED)
    for file in store.path.glob("*.bin"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rates(folder: Path, num_steps: int, batches: int) -> dict[str, float]:
    """Steps per second, with and without drawing ahead; a third of the data may be cached."""
    view = make_pictures(folder / "pictures", num_steps)
    store: Any = view._store
    view.sample_transitions(np.random.default_rng(0), 4 * len(list(store.path.glob("*.bin"))))
    os.sync()
    weights = torch.randn(128 * 128 * 3, 64)
    allowed = store.disk_bytes / 3
    found = {}
    for wanted in (False, True):
        forget(store)
        generator, read = np.random.default_rng(2), 0
        drawn = (view.sample_transitions(generator, PICTURES_BATCH) for _ in range(batches))
        begin = time.perf_counter()
        for steps in ahead(drawn, wanted):
            torch.from_numpy(steps.obs["image"]).float().flatten(1).mm(weights).sum().item()
            read += 2 * steps.obs["image"].nbytes
            if read > allowed:
                forget(store)
                read = 0
        seconds = time.perf_counter() - begin
        found["ahead" if wanted else "plain"] = batches * PICTURES_BATCH / seconds
    print(", ".join(f"{name}: {rate:,.0f} steps/s" for name, rate in found.items()))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000, help="steps that are imported")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="episodes drawn from")
    parser.add_argument("--draws", type=int, default=2000, help="minibatches that are timed")
    parser.add_argument("--pictures", type=int, default=24_000, help="steps with pictures")
    parser.add_argument("--batches", type=int, default=300, help="of pictures, each way")
    small = {"steps": 20_000, "episodes": 2_000, "draws": 200, "pictures": 300, "batches": 10}
    options = parse(parser, small, arguments)
    needs = {"steps": options.steps, "draws": options.draws, "batches": 2 * options.batches}
    with Gate("datasets", options, needs=needs) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            most, seconds = import_bytes(Path(scratch), options.steps)
            gate.count("steps", options.steps if most else 0)
            gate.figure("GiB of an import", most / GIB, at_most=MOST_BYTES / GIB)
            more = growth(Path(scratch), options.episodes, options.draws)
            gate.count("draws", options.draws if np.isfinite(more) else 0)
            gate.figure("growth of a draw", more, at_most=MOST_GROWTH, timing=True)
            found = rates(Path(scratch), options.pictures, options.batches)
            gate.count("batches", options.batches * len(found))
            gate.details = {"import_seconds": seconds, "steps_per_second": found}
            for name, rate in found.items():
                gate.figure(f"steps/s {name}", rate, at_least=0.0, timing=True)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
