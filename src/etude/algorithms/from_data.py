"""What methods share that learn from a dataset: how it is opened, and its lines of a plan."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from etude.algorithms.held_out import DatasetConfig, EpisodesOf
from etude.core.clock import Nest
from etude.core.contracts import Exactness
from etude.core.errors import UsageError
from etude.experience.contrast import contrast
from etude.experience.store.episodes import EpisodeStore, StoreGeometry
from etude.experience.store.files import DESCRIPTION, read_geometry
from etude.planning.kinds import device
from etude.planning.recipe import Recipe


def look_into(config: DatasetConfig) -> StoreGeometry:
    """What the dataset holds that a config names."""
    name = config.dataset
    if not name or not (Path(name) / DESCRIPTION).is_file():
        what = f" (no {DESCRIPTION} in it)" if name and Path(name).is_dir() else ""
        raise UsageError(
            f"There is no dataset at '{name}'{what}: name one with --algorithm.dataset FOLDER; "
            "`etude data record` makes one, `etude data import` reads those of others."
        )
    return read_geometry(Path(name))


def open_dataset(config: DatasetConfig, reads: Collection[str]) -> EpisodeStore:
    """The dataset a config names, of whose steps only these observations are read."""
    look_into(config)
    return EpisodeStore.open(Path(config.dataset), reads)


def refuse_collection(recipe: Recipe) -> None:
    """What only makes sense where something is collected."""
    if recipe.collector.lag:
        raise UsageError(
            "Learning from a dataset has nothing to collect ahead: leave collector.lag at 0."
        )


def exactness(recipe: Recipe) -> Exactness:
    """Whether a run resumes bit for bit."""
    if device(recipe).type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ")
    return Exactness(True, "the dataset is sealed and named by its hash")


def shapes(store: EpisodeStore, reads: Collection[str], batch: int) -> dict[str, Any]:
    """What is drawn of a dataset, `batch` steps at a time."""
    return {
        name: {
            "dtype": spec.dtype,
            "buffer": [store.num_transitions, *spec.shape],
            "minibatch": [batch, *spec.shape],
        }
        for name, spec in store.geometry.specs_read(reads).items()
    }


TITLE = "Dataset: [steps, ...]"


def passes(training: EpisodesOf, loops: Nest, batch: int) -> float:
    """How often a run sees every step that is not held out, on average, in batches of a size."""
    return loops.total.updates * batch / training.num_transitions


def usage(num_passes: float) -> str:
    """The same in words."""
    return f"every step that is not held out is used {num_passes:,.1f} times in all, on average"


def disk(store: EpisodeStore) -> dict[str, int]:
    """Bytes of the dataset."""
    return {"dataset": store.geometry.dataset_bytes(store.num_transitions, store.num_episodes)}


def notes(
    store: EpisodeStore, reads: Collection[str], training: EpisodesOf, held_out: EpisodesOf
) -> list[str]:
    """What the plan says of the dataset."""
    unread = sorted(store.geometry.observations.keys() - set(reads))
    said = [
        f"{held_out.num_whole:,} of {store.num_episodes:,} episodes are held out for tests.",
        "Curves are over gradient updates: nothing is collected.",
    ]
    if clips := training.num_clips + held_out.num_clips:
        found = contrast(store.returns, store.lengths)
        why = "" if found.enough else f", because {found.reason} and would teach no reward"
        said.append(
            f"{clips:,} clips that end before their episode does are added as failures{why} "
            "(algorithm.add_truncated)."
        )
    if unread:
        names = ", ".join(f"'{name}'" for name in unread)
        said.append(f"Nothing reads {names} of the dataset: that stays on the disk.")
    return said
