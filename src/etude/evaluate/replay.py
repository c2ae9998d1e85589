"""Any training episode of a run again, with the policy, noise and physics that it had.

The run is computed forward to the iteration (`etude.building.rewind`), and the rollouts of the
episode's group are repeated in an environment that is filmed. A rollout is a pure function of the
broadcast weights, the group's snapshot and a key, so both give the same bits, which is checked.
"""

from __future__ import annotations

import base64
import copy
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from etude.building.rewind import Rewound, Watch, find_start, iteration_at, plan_text, rewound
from etude.core.contracts import (
    Algorithm,
    Array,
    ArraySpec,
    BatchEnv,
    Broadcast,
    Described,
    EnvSpec,
    EnvWrapper,
    Fragment,
    Observations,
    StepResult,
    ability,
)
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.trees import Tree
from etude.data.importing import finish, new_store
from etude.data.store.geometry import OBS, is_picture
from etude.data.store.labels import Labels
from etude.data.store.manifest import ENTRY
from etude.envs.mujoco.env import MujocoEnv
from etude.evaluate import film
from etude.evaluate.footage import Footage, can_film, footage, recorder
from etude.evaluate.viewer.serving import embedded
from etude.evaluate.viewer.sources import Source
from etude.models.policies import BasePolicy, make_policy, map_features
from etude.planning import recipes
from etude.planning.recipe import Resolved
from etude.rl.off_policy import OffPolicy
from etude.rollout.group import Group
from etude.runs import files
from etude.runs.folder import RunFolder

Say = Callable[[str], None]
PAGE, TABLE, DATASET = "page.html", "table.csv", "dataset"
_PICTURE, _RATE = (480, 270), 15.0
"""Size of the page's pictures in pixels, and most pictures per second of the episode."""
_BYTES_PER_SECOND = 60_000
"""Bytes of pictures per second of film, before base64: less than 5 MB per minute with curves."""
_QUALITIES = (60, 45, 30, 18, 8)


class Place(NamedTuple):
    """A step of an environment of a run."""

    iteration: int
    column: int
    """Step of the environment in the iteration."""
    env: int


@dataclass
class Rollout:
    """A group's part of an iteration, and what the learner made of one environment in it."""

    broadcast: Broadcast
    snapshot: Tree | None
    """Before it; None at the start of the run."""
    fragment: Fragment | None = None
    """Copies of the whole group's arrays; None until it was collected."""
    learned: dict[str, Array] = field(default_factory=dict)
    """{name: [steps]} of the environment."""


class Recorder(Watch):
    """Keeps the rollouts of one group."""

    def __init__(self, env: int, envs_per_group: int) -> None:
        self.group, self.row = divmod(env, envs_per_group)
        self.env = env
        self.rollouts: dict[int, Rollout] = {}
        self.newest = 0
        """The iteration that is computed, and trained on."""

    def collecting(self, iteration: int, broadcast: Broadcast, groups: Tree) -> None:
        snapshot = groups.get(f"{self.group:06d}")
        self.rollouts[iteration] = Rollout(broadcast, snapshot)

    def collected(self, iteration: int, fragments: list[Fragment]) -> None:
        # The buffer is filled again by a later iteration.
        self.rollouts[iteration].fragment = copy.deepcopy(fragments[self.group])

    def ingested(self, algorithm: Algorithm) -> None:
        found = _values(algorithm, self.env, self.at(self.newest))
        self.rollouts[self.newest].learned |= found

    def updated(self, algorithm: Algorithm) -> None:
        self.rollouts[self.newest].learned |= _ratios(algorithm, self.env)

    def at(self, iteration: int) -> Fragment:
        """The group's part of an iteration that was collected."""
        found = self.rollouts[iteration].fragment
        assert found is not None
        return found

    def ends(self, iteration: int) -> Array:
        """[k]: the columns of an iteration in which episodes of the environment ended."""
        fragment = self.at(iteration)
        ended: Array = fragment.terminated[self.row] | fragment.truncated[self.row]
        return ended.nonzero()[0]


def _part(algorithm: Any, env: int) -> tuple[Any, int] | None:
    """(shard, row in it) of an environment, of algorithms with shards of a rollout as PPO's; None
    of others."""
    shards = getattr(algorithm, "shards", [])
    for number, shard in zip(getattr(algorithm, "local_shards", ()), shards, strict=False):
        envs = algorithm.geometry.shard_envs(number)
        if envs.start <= env < envs.stop:
            return shard, env - envs.start
    return None


@torch.no_grad()
def _values(algorithm: Any, env: int, fragment: Fragment) -> dict[str, Array]:
    """{name: [steps]} that the algorithm computed of an environment's steps before its update."""
    if (found := _part(algorithm, env)) is not None:
        shard, row = found
        steps = algorithm.geometry.steps
        named = {"value": shard.values, "return": shard.returns, "advantage": shard.advantages}
        return {n: x.reshape(-1, steps)[row].cpu().numpy().copy() for n, x in named.items()}
    if isinstance(algorithm, OffPolicy):
        row = env % len(fragment.rewards)
        seen = {n: algorithm.put(fragment.obs[n][row]) for n in algorithm.policy.observations}
        actions = algorithm.put(fragment.actions[row]).clamp(-1.0, 1.0)
        value = algorithm.critics.min_q(algorithm.policy.prepare(seen), actions)
        return {"value": value.cpu().numpy()}
    if (lesson := getattr(algorithm, "lesson", None)) is not None:
        labels = lesson.labels
        mine = labels.reshape(-1, algorithm.geometry.steps, labels.shape[-1])[env].cpu().numpy()
        return {f"teacher's action[{i}]": mine[:, i].copy() for i in range(mine.shape[1])}
    return {}


@torch.no_grad()
def _ratios(algorithm: Any, env: int) -> dict[str, Array]:
    """{"ratio": [steps]}: probabilities of the actions after the update over those before."""
    if (found := _part(algorithm, env)) is None:
        return {}
    shard, row = found
    if shard.images:  # half of the segments are mirror images now
        return {}
    geometry = algorithm.geometry
    size = geometry.steps // geometry.horizon
    mine = slice(row * size, (row + 1) * size)
    memory = shard.memory and shard.memory.at(mine)
    features = map_features(shard.features, lambda x: x[mine])
    now = algorithm.policy.evaluate(features, shard.actions[mine], memory).log_probs
    return {"ratio": (now - shard.log_probs[mine]).exp().flatten().cpu().numpy()}


@dataclass
class Episode:
    """One training episode of T steps."""

    run: Path
    place: Place
    """That it was found by."""
    begins: tuple[int, int]
    """Iteration and column of its first step."""
    spec: EnvSpec
    obs: Observations
    """{name: [T + 1, ...]}, raw."""
    actions: Array
    """[T, n], of the policy."""
    rewards: Array
    """[T], of the environment."""
    columns: dict[str, Array]
    """{name: [T]}: iteration, environment step of the run, reward terms, log-probability, value,
    advantage, probability ratio; NaN where a step has none."""
    terminated: bool
    ending: str
    """The cause of its end; "" if it is cut."""
    success: bool | None
    statistics: dict[str, float]
    names: dict[str, list[str]]
    """{observation or "actions": names of its numbers}."""
    footage: Footage | None = None
    notes: list[str] = field(default_factory=list)
    is_same: bool = True
    """Whether log rows and rollouts that were computed twice have the same bits."""

    @property
    def length(self) -> int:
        return len(self.rewards)

    @property
    def title(self) -> str:
        first = int(self.columns["step"][0])
        return f"{self.run.name}, environment {self.place.env}, from step {first:,}"

    def sentence(self) -> str:
        """Its result as a sentence."""
        how = f"ended by {self.ending}" if self.ending else "not ended"
        return (
            f"Episode of environment {self.place.env}: steps {self.columns['step'][0]:,.0f} to "
            f"{self.columns['step'][-1]:,.0f} of the run (iterations "
            f"{self.columns['iteration'][0]:.0f} to {self.columns['iteration'][-1]:.0f}), "
            f"{self.length} steps, return {self.rewards.sum(dtype=np.float64):.4g}, {how}."
        )


def replay(
    path: Path,
    step: int,
    env: int = 0,
    episode: int = 0,
    say: Say = lambda text: None,
    trust: bool = False,
    film: bool = True,
    threads: int | None = None,
) -> Episode:
    """The training episode of an environment in progress at a step of the run, or the `episode`-th
    after it."""
    folder = RunFolder.open(path, write=False)
    recipe = recipes.with_changes(recipes.load(folder.recipe, trust), folder, trust)
    loops = recipe.algorithm.loops(recipe, recipe.algorithm.geometry(recipe))
    config = recipe.collector
    if not loops.steps_per_iteration:
        raise UsageError(
            f"{path} learns from a dataset and plays no training episodes: `etude inspect {path} "
            f"--at {step}` shows what it learned from in a step."
        )
    if not 0 <= env < config.num_envs:
        raise UsageError(f"The run has the environments 0 to {config.num_envs - 1:,}, not {env:,}.")
    column = step % loops.steps_per_iteration // config.num_envs
    place = Place(iteration_at(step, loops), column, env)
    first = place.iteration
    while True:
        start = find_start(folder, first * loops.steps_per_iteration)
        say(plan_text(folder, start, place.iteration))
        watch = Recorder(env, config.envs_per_group)
        with rewound(path, first, watch, trust, threads) as moment:
            search = _Search(moment, watch)
            found = search.episode(place, episode)
            if isinstance(found, _Span):
                return _repeated(search, place, found, film)
        say("The episode began before that checkpoint.")
        first = found


class _Span(NamedTuple):
    """The steps of an episode, [begin, end) as steps of the environment since the run began."""

    begin: int
    end: int
    ended: bool


class _Search:
    """Computes a run forward until an episode has ended."""

    def __init__(self, moment: Rewound, watch: Recorder) -> None:
        self.moment, self.watch = moment, watch
        self.steps = _steps(moment.run)
        self.failure = ""
        """Why the run fails in the newest iteration; its rollout is known all the same."""

    def episode(self, place: Place, number: int) -> _Span | int:
        """The steps of the `number`-th episode from a place on; or the iteration that it began in,
        if that was not computed."""
        moment, steps, here = self.moment, self.steps, place.iteration
        with waiting("computing again", here + 1 - moment.now, "iterations") as wait:
            while moment.now <= here and not self.failure:
                self._forward()
                wait.done += 1
        if self.watch.rollouts.keys() < {here}:
            raise EtudeError(f"The run fails before that step. {self.failure}")
        at = here * steps + place.column
        ends = self._ends(here)
        before, after = [e for e in ends if e < at], [e for e in ends if e >= at]
        begin = before[-1] + 1 if before else here * steps - self._open(here)
        while True:
            while not after:
                if self.failure or moment.loop.clock.finished:
                    last = max(self.watch.rollouts) + 1
                    return self._known(_Span(begin, last * steps, False))
                now = moment.now
                self._forward()
                if self.watch.at(now).restarted[self.watch.row]:  # abandoned by the curriculum
                    if not number:
                        return self._known(_Span(begin, now * steps, False))
                    number, begin = number - 1, now * steps
                after = self._ends(now)
            if not number:
                return self._known(_Span(begin, after[0] + 1, True))
            number, begin = number - 1, after.pop(0) + 1

    def _forward(self) -> None:
        """Compute one iteration, to its rollout if it fails."""
        self.watch.newest = self.moment.now
        try:
            self.moment.forward(1)
        except NonFinite as error:
            self.failure = str(error)

    def _ends(self, iteration: int) -> list[int]:
        """Steps of the environment in an iteration that ended an episode."""
        return [iteration * self.steps + int(column) for column in self.watch.ends(iteration)]

    def _open(self, iteration: int) -> int:
        """Steps before an iteration of the episode that was open then."""
        snapshot, row = self.watch.rollouts[iteration].snapshot, self.watch.row
        if snapshot is None or self.watch.at(iteration).restarted[row]:
            return 0
        return int(snapshot["open"]["lengths"][row])

    def _known(self, span: _Span) -> _Span | int:
        begin = span.begin // self.steps
        return span if begin in self.watch.rollouts else begin


def _steps(run: Resolved) -> int:
    """Steps of every environment in an iteration."""
    return run.loops.steps_per_iteration // run.recipe.collector.num_envs


class _Terms(EnvWrapper):
    """Keeps the reward terms of one environment."""

    def __init__(self, inner: BatchEnv, row: int) -> None:
        super().__init__(inner)
        self._row, self._simulated = row, ability(inner, MujocoEnv)
        self.terms: dict[str, list[float]] = {}

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        if self._simulated is not None:
            for name, values in self._simulated.reward_terms.items():
                self.terms.setdefault(name, []).append(float(values[self._row]))
        return result


def _repeated(search: _Search, place: Place, span: _Span, draw: bool) -> Episode:
    """Repeat the rollouts of an episode's group, and put the episode together."""
    moment, watch, steps = search.moment, search.watch, search.steps
    run, row = moment.run, watch.row
    begin, last = span.begin // steps, (span.end - 1) // steps
    number = int((watch.ends(begin) < span.begin % steps).sum())
    config, recipe = run.recipe.collector, run.recipe
    env = recipe.task.for_film().make(config.envs_per_group, config.engine_threads)
    is_drawn = draw and can_film(env)
    filmed: Any = recorder(env, [(row, number)]) if is_drawn else env
    terms = _Terms(filmed, row)
    group, policy = Group(terms), make_policy(recipe.policy, run.spec, None)
    key = Key(recipe.seed).child("collect", "group", watch.group)
    different = list[str]()
    snapshot = watch.rollouts[begin].snapshot
    try:
        for iteration in range(begin, last + 1):
            rollout = watch.rollouts[iteration]
            snapshot = _repeat(group, policy, key, iteration, snapshot, rollout, different)
        recording = filmed.recordings[row, number] if is_drawn else None
        shown = None
        if recording is not None:
            _cut(recording, span.end - span.begin, env)
            shown = footage(env, recording)
        names = _names(env, run.spec)
    finally:
        terms.close()
    found = _joined(run, watch, place, span, terms.terms, names)
    found.run, found.footage = moment.folder.path, shown
    found.notes += moment.notes
    found.is_same = moment.is_same and not different
    if different:
        found.notes.append(f"A repeated rollout differs from the run's: {different[0]}.")
    if search.failure:
        found.notes.append(f"The run fails in its last iteration. {search.failure}")
    return found


def _cut(recording: Any, steps: int, env: BatchEnv) -> None:
    """Remove what was recorded after the last step of an episode that has not ended."""
    simulated = ability(env, MujocoEnv)
    substeps = simulated.task.substeps if simulated is not None else 1
    sizes = {"states": steps + 1, "markers": steps + 1, "jpegs": steps + 1}
    for name, size in {**sizes, "path": steps * substeps + 1}.items():
        if hasattr(recording, name):
            del getattr(recording, name)[size:]


def _repeat(
    group: Group,
    policy: BasePolicy,
    key: Key,
    iteration: int,
    snapshot: Tree | None,
    rollout: Rollout,
    different: list[str],
) -> Tree:
    """Repeat one rollout, and compare it with the run's; returns the snapshot after it."""
    known = rollout.fragment
    assert known is not None
    policy.load_state_dict(rollout.broadcast.policy)
    group.follow(rollout.broadcast.curriculum)
    if snapshot is None:
        snapshot = group.begin(policy, key)
    again, after = group.rollout(policy, snapshot, key, iteration, copy.deepcopy(known))
    for name in ("actions", "rewards", "terminated", "truncated", "log_probs"):
        if getattr(again, name).tobytes() != getattr(known, name).tobytes():
            different.append(f"{name} of iteration {iteration:,}")
    for name, array in known.obs.items():
        if again.obs[name].tobytes() != array.tobytes():
            different.append(f"observation '{name}' of iteration {iteration:,}")
    return after


def _joined(
    run: Resolved,
    watch: Recorder,
    place: Place,
    span: _Span,
    terms: Mapping[str, Sequence[float]],
    names: dict[str, list[str]],
) -> Episode:
    """The episode from the rollouts that it is in."""
    steps, row = _steps(run), watch.row
    begin, last = span.begin // steps, (span.end - 1) // steps
    rollouts = [watch.rollouts[i] for i in range(begin, last + 1)]
    parts = [watch.at(i) for i in range(begin, last + 1)]
    num_envs = run.recipe.collector.num_envs
    inside = slice(span.begin - begin * steps, span.end - begin * steps)
    size = span.end - span.begin

    def whole(arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)[inside].copy()

    final, statistics = _final(parts[-1], row, (span.end - 1) % steps, span.ended)
    obs = {
        name: np.concatenate([whole([f.obs[name][row] for f in parts]), final[name][None]])
        for name in run.spec.observations
    }
    at = np.arange(span.begin, span.end)
    columns = {
        "iteration": (at // steps).astype(np.float64),
        "step": (at * num_envs).astype(np.float64),
        "reward": whole([f.rewards[row] for f in parts]).astype(np.float64),
        "log_prob": whole([f.log_probs[row] for f in parts]).astype(np.float64),
    }
    # Terms were recorded from the first rollout on.
    for name, values in terms.items():
        columns[f"reward/{name}"] = np.array(values[inside], np.float64)
    learned = dict.fromkeys(name for rollout in rollouts for name in rollout.learned)
    for name in learned:
        blank = np.full(steps, np.nan)
        columns[name] = whole([r.learned.get(name, blank) for r in rollouts]).astype(np.float64)
    terminated = bool(parts[-1].terminated[row, (span.end - 1) % steps]) and span.ended
    ending, success = "", None
    if span.ended:
        ending = "termination" if terminated else "the time limit"
        if run.spec.outcomes and "outcome" in statistics:
            outcome = run.spec.outcomes[int(statistics["outcome"])]
            ending = (
                outcome if terminated or outcome == "success" else f"the time limit ({outcome})"
            )
        if "is_success" in statistics:
            success = bool(statistics["is_success"])
    return Episode(
        run=Path(),
        place=place,
        begins=(begin, span.begin % steps),
        spec=run.spec,
        obs=obs,
        actions=whole([f.actions[row] for f in parts]),
        rewards=whole([f.rewards[row] for f in parts]),
        columns={n: x[:size] for n, x in columns.items()},
        terminated=terminated,
        ending=ending,
        success=success,
        statistics=statistics,
        names=names,
    )


def _final(
    fragment: Fragment, row: int, column: int, ended: bool
) -> tuple[Observations, dict[str, float]]:
    """(observations after the last step of an episode, its statistics)."""
    if ended:
        finals = fragment.finals
        (at,) = ((finals.envs == row) & (finals.steps == column)).nonzero()
        statistics = {name: float(x[at[0]]) for name, x in fragment.episodes.items()}
        return {name: array[at[0]] for name, array in finals.obs.items()}, statistics
    return {name: array[row] for name, array in fragment.last_obs.items()}, {}


def _names(env: BatchEnv, spec: EnvSpec) -> dict[str, list[str]]:
    """{observation or "actions": names of its numbers}, if the environment describes them."""
    found: dict[str, list[str]] = {}
    described = ability(env, Described)
    content: Tree = {}
    with suppress(Exception):  # only names
        content = {} if described is None else described.describe()
    for name, layout in content.get("observations", {}).items():
        if layout["history"] > 1:
            continue
        found[name] = [
            term["name"] if term["size"] * term["history"] == 1 else f"{term['name']}[{i}]"
            for term in layout["terms"]
            for i in range(term["size"] * term["history"])
        ]
    sizes = {n: int(np.prod(s.shape, dtype=np.int64)) for n, s in spec.observations.items()}
    found = {n: names for n, names in found.items() if sizes.get(n) == len(names)}
    joints = [each["joint"] or each["name"] for each in content.get("actuators", [])]
    if spec.action.kind == "box" and len(joints) == spec.action.array.shape[0]:
        found["actions"] = joints
    return found


def table(episode: Episode) -> str:
    """One row per step as CSV: observations, actions, and all columns."""
    header = ["episode_step", *episode.columns]
    parts = [np.arange(episode.length)[:, None], *(x[:, None] for x in episode.columns.values())]
    arrays = {"action": episode.actions, **{n: x[:-1] for n, x in episode.obs.items()}}
    for name, array in arrays.items():
        known = episode.names.get("actions" if name == "action" else name)
        spec = None if name == "action" else episode.spec.observations[name]
        if spec is not None and is_picture(spec):
            continue
        flat = array.reshape(len(array), -1)
        header += [f"{name}/{n}" for n in known or map(str, range(flat.shape[1]))]
        parts.append(flat)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*header, "ended_by"])
    for i in range(episode.length):
        cells = [repr(x) for part in parts for x in part[i].tolist()]
        writer.writerow([*cells, episode.ending if i == episode.length - 1 else ""])
    return stream.getvalue()


def write_dataset(episode: Episode, to: Path) -> None:
    """Write a sealed dataset of the episode."""
    specs = episode.spec.observations
    fields = {OBS + n: ArraySpec(s.shape, s.dtype) for n, s in specs.items()}
    fields["actions"] = episode.spec.action.array
    with new_store(to, fields, episode.length) as store:
        store.append_episode(episode.obs, episode.actions, episode.rewards, episode.terminated)
        labels = Labels()
        labels.add(episode.title, "training", success=episode.success)
        finish(store, {"source": episode.title, "format": "replayed"}, labels).close()


class _EpisodeSource(Source):
    """The replayed episode for the page."""

    def __init__(self, episode: Episode) -> None:
        entry, labels = np.zeros(1, ENTRY), Labels()
        entry["length"], entry["return"] = episode.length, episode.rewards.sum(dtype=np.float64)
        labels.add(episode.title, episode.ending, success=episode.success)
        super().__init__("training episode", entry, labels)
        self.note = " ".join([episode.sentence(), *episode.notes])
        groups = _groups(episode.columns)
        self._arrays = {"actions": episode.actions, "rewards": episode.rewards}
        self._arrays |= {n: np.stack([*x.values()], axis=1) for n, x in groups.items()}
        obs = {n: x[:-1] for n, x in episode.obs.items() if x.ndim < 4}
        self._arrays |= {OBS + n: x.reshape(len(x), -1) for n, x in obs.items()}
        self.names = {n: [*x] for n, x in groups.items()}
        self.names |= {n if n == "actions" else OBS + n: x for n, x in episode.names.items()}
        self.specs = {n: ArraySpec(x.shape[1:], str(x.dtype)) for n, x in self._arrays.items()}
        self._numbers = {n: f"{x:.6g}" for n, x in episode.statistics.items()}

    @property
    def curves(self) -> list[str]:
        return [*self._arrays]

    def columns(self, number: int, names: Any, offsets: Array) -> dict[str, Array]:
        return {name: self._arrays[name][offsets] for name in names}

    def numbers(self, number: int) -> dict[str, str]:
        return self._numbers


def _groups(columns: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Columns that are drawn together: reward terms, and what the learner computed."""
    terms = {n.removeprefix("reward/"): x for n, x in columns.items() if n.startswith("reward/")}
    values = {n: columns[n] for n in ("value", "return") if n in columns}
    found = {"reward terms": terms, "value": values}
    for name in ("advantage", "ratio", "log_prob", "iteration"):
        found[name] = {name: columns[name]} if name in columns else {}
    return {name: group for name, group in found.items() if group}


def page(episode: Episode) -> str:
    """A page with a timeline, in one file that needs no network."""
    pictures, stride, rate = list[str](), 1, 0.0
    if episode.footage is not None:
        pictures, stride, rate = _pictures(episode.footage)
    return embedded(episode.title, _EpisodeSource(episode), pictures, stride, rate)


def _pictures(shown: Footage) -> tuple[list[str], int, float]:
    """(pictures as data URIs, steps between two of them, steps per second)."""
    rate = shown.moment_rate / shown.substeps
    stride = max(1, round(rate / _RATE))
    moments = range(0, shown.moments, stride * shown.substeps)
    drawn = []
    with waiting("drawing", len(moments), "pictures") as wait:
        for picture in shown.draw(moments, _PICTURE):
            drawn.append(Image.fromarray(picture.pixels))
            wait.done += 1
    budget = _BYTES_PER_SECOND * max(shown.seconds, 1.0)
    for quality in _QUALITIES:
        encoded = [_webp(picture, quality) for picture in drawn]
        if sum(map(len, encoded)) <= budget:
            break
    kind = "webp" if encoded and encoded[0][:4] == b"RIFF" else "jpeg"
    uris = [f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for data in encoded]
    return uris, stride, rate


def _webp(picture: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    kind = "WEBP" if film.has_webp() else "JPEG"
    picture.save(stream, kind, quality=quality)
    return stream.getvalue()


def write(episode: Episode, to: Path, formats: Sequence[str]) -> list[Path]:
    """Write the page, film, table or dataset of an episode to a folder; their paths."""
    files.make_folder(to)
    made = []
    if "page" in formats:
        made.append(_text(to / PAGE, page(episode)))
    if "table" in formats:
        made.append(_text(to / TABLE, table(episode)))
    if "dataset" in formats:
        write_dataset(episode, to / DATASET)
        made.append(to / DATASET)
    if "film" in formats:
        if episode.footage is None:
            raise EtudeError("Nothing draws this environment: there is no film.")
        scene = film.Scene(
            episode.footage, episode.title, "", episode.ending or "not ended", episode.success
        )
        made += film.write([scene], to, "film", film.SMALL)
    return made


def _text(path: Path, text: str) -> Path:
    files.replace_file(path, [text.encode()])
    return path
