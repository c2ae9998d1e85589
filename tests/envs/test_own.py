"""One's own: tasks, recipes as functions, and the check that names what is wrong with a task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude.api import Run, resume
from etude.cli import main as cli
from etude.cli.target import find_target
from etude.core.contracts import Array, Observations, StepResult
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.data.store.episodes import EpisodeStore
from etude.data.store.files import read_geometry
from etude.envs import check
from etude.envs.array_task import ArrayTask, Outcome
from etude.envs.named_task import TaskConfig, make_task
from etude.planning import recipes
from etude.runs import checkpoint
from etude.runs.files import Disk
from etude.tasks.seek import Seek
from toy_envs import ToyEnv

TASK = '''
import numpy as np
import etude

class Cart(etude.ArrayTask):
    """Push a cart to the middle and keep it there."""

    observations = {"state": 2}
    action = etude.ActionSpec("discrete", sizes=(3,))
    max_episode_steps = 40
    statistics = ("is_success", "distance")
    place = etude.State()
    speed = etude.State()

    def __init__(self, num_envs, threads=1, force=0.05):
        super().__init__(num_envs)
        self.force = force

    def reset_rows(self, rows, streams):
        self.place[rows] = [stream.choice([-1, 1]) * stream.uniform(0.5, 1) for stream in streams]
        self.speed[rows] = 0.0

    def advance(self, actions):
        self.speed = 0.9 * self.speed + self.force * (actions - 1)
        self.place += self.speed
        away = np.abs(self.place)
        rest = (away < 0.05) & (np.abs(self.speed) < 0.05)
        return etude.Outcome(-0.1 * away + rest, rest, {"is_success": rest, "distance": away})

    def observe(self):
        return {"state": np.stack([self.place, self.speed], axis=1)}
'''

RECIPES = """
import etude

def mine():
    return etude.recipes.ppo().model_copy(update={"name": "mine", "seed": 7})

def number():
    return 3

def misspelt():
    return etude.Recipe(name="x", sed=3)

def crash():
    return {}["a"]

constant = 3
"""

SMALL = [
    "--collector.num_envs=8",
    "--collector.envs-per-group=4",
    "--algorithm.rollout-steps=16",
    "--algorithm.minibatch-size=64",
    "--algorithm.update-epochs=2",
    "--evaluation.episodes=4",
    "--evaluation.num_envs=4",
    "--evaluation.envs-per-group=4",
    "--clock.total-timesteps=1024",
    "--clock.cycles=1",
    "--clock.iterations=1",
    "--seed=3",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a person works in, with a task and recipes of their own."""
    (tmp_path / "own_cart.py").write_text(TASK)
    (tmp_path / "own_recipes.py").write_text(RECIPES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def said(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert cli.main(list(arguments)) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


@pytest.mark.parametrize("task", ["own_cart:Cart", "own_cart.py:Cart"])
def test_a_task_of_ones_own_trains_exactly(
    task: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--env.task", task, "--env.options", "force", "0.1", *SMALL]
    plan = json.loads(said(["plan", "ppo", *options, "--json"], capsys, 0))
    assert plan["exactness"]["exact"], plan["exactness"]
    said(["train", "ppo", *options, "--folder", "whole"], capsys, 0)
    run = Run("whole")
    assert isinstance(run.recipe.env, TaskConfig)
    assert run.recipe.env.options == {"force": 0.1}
    assert "rollout/success_rate" in run.rows()[-1]
    shutil.copytree("whole", "again", symlinks=True)
    last = (folder / "again" / "checkpoints" / "latest").resolve()
    shutil.rmtree(last)
    resume("again")
    assert Run("again").fingerprint() == run.fingerprint()
    # A policy acts without the task's code.
    assert etude.load_policy("whole").act(np.zeros(2)).shape == ()


def test_env_id_and_env_task_choose_the_kind(folder: Path) -> None:
    for options, kind in ((["--env.id", "Pendulum-v1"], "gym"), (["--env.task=a:B"], "task")):
        for name in ("reach", "ppo"):
            assert find_target([name, *options])[0].env.kind == kind
    assert find_target(["reach", "--seed=3"])[0].env.kind == "reach"


def test_a_task_that_cannot_be_saved_says_so_and_still_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--env.task", f"{__name__}:Forgetful", *SMALL]
    text = said(["plan", "ppo", *options], capsys, 0)
    assert "NOT exact" in text
    assert "keeps state that is not in its snapshot" in " ".join(text.split())
    path = tmp_path / "run"
    said(["train", "ppo", *options, "--folder", str(path)], capsys, 0)
    shutil.rmtree((path / "checkpoints" / "latest").resolve())
    assert resume(path).summary()["counts"]["timesteps"] == 1024


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_replay_of_a_task_that_cannot_be_saved_closes_its_episodes(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume ends what was open as truncated, and no transition leads from one episode to
    another: a toy counts the steps of an episode and keeps its level."""
    options = [
        *("--env.task", f"{__name__}:Worn", "--seed=3", "--policy.hidden", "16"),
        *("--collector.num_envs=8", "--collector.envs-per-group=4", "--learner.shards=2"),
        *("--algorithm.rollout-steps=16", "--algorithm.train-batches=2"),
        *("--evaluation.episodes=4", "--evaluation.num_envs=4", "--evaluation.envs-per-group=4"),
        *("--clock.total-timesteps=1024", "--clock.cycles=1", "--clock.iterations=1"),
    ]
    text = " ".join(said(["plan", kind, *options], capsys, 0).split())
    assert "NOT exact" in text
    assert "keeps state that is not in its snapshot" in text
    assert "A resume truncates the episodes in progress" in text
    path = tmp_path / "run"
    said(["train", kind, *options, "--folder", str(path)], capsys, 0)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["exactness"].startswith("not exact: ")
    before = Run(path).summary()["counts"]
    shutil.rmtree((path / "checkpoints" / "latest").resolve())
    run = resume(path)
    assert run.summary()["counts"] == before
    closed = -run.summary()["episodes"]
    state = checkpoint.load_training(path / "checkpoints" / "latest")[2]["algorithm"]["stores"]
    for shard, named in enumerate(state.values()):
        folder = path / "replay" / f"shard-{shard}"
        store = EpisodeStore.create(folder, read_geometry(folder), Disk())
        store.load_state_dict(named)
        closed += store.num_episodes
        for number in range(store.num_episodes):
            steps, whole = store.episode(number)
            here, after = steps.obs["state"], steps.next_obs["state"]
            np.testing.assert_array_equal(here[:, 0], np.arange(len(here)))
            np.testing.assert_array_equal(after[:, 0], 1 + np.arange(len(here)))
            assert len(np.unique(np.concatenate((here, after))[:, 1:3], axis=0)) == 1
            ends = steps.terminated | steps.truncated
            assert ends.tolist() == [False] * (len(here) - 1) + [True]
            assert whole == pytest.approx(steps.rewards.astype(float).sum())
        store.close()
    assert 0 < closed <= 8  # Of 8 rows, those that were within an episode.


def test_ranks_that_sac_does_not_have_are_not_blamed_on_the_environment() -> None:
    recipe = recipes.find("sac")
    fast = recipe.learner.model_copy(update={"reduce": "fast"})
    with pytest.raises(UsageError, match=r"without ranks whose gradients learner.reduce fast"):
        etude.plan(recipe.model_copy(update={"learner": fast}))


@pytest.mark.parametrize("target", ["own_recipes.py:mine", "own_recipes:mine"])
def test_a_recipe_is_a_function(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipes.find(target).seed == 7
    plan = json.loads(said(["plan", target, "--clock.cycles=2", "--json"], capsys, 0))
    assert plan["recipe"] == "mine"
    assert plan["levels"]["cycles_per_epoch"] == 2


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_recipes.py", "own_recipes.py:FUNCTION"),
        ("own_recipes.py:min", "did you mean 'mine'"),
        ("own_recipes.py:zzz", "has no 'zzz'"),
        ("own_recipes.py:number", "must return an etude.Recipe"),
        ("own_recipes.py:constant", "not a function"),
        ("own_recipes.py:misspelt", "no field sed (did you mean seed?)"),
        ("own_recipes.py:crash", "KeyError: 'a' (own_recipes.py, line 14)"),
        ("no_such_file.py:mine", "no file no_such_file.py"),
        ("no_such_module:mine", "no module 'no_such_module'"),
        (":mine", "write my_recipes.py:my_recipe"),
    ],
)
def test_a_bad_recipe_function_is_refused(
    target: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(["plan", target], capsys, 2)
    assert words in text
    assert "Traceback" not in text


def test_code_that_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "own_broken.py").write_text("def f(:\n")
    (folder / "own_needy.py").write_text("import no_such_package\n")
    for target, words in (
        ("own_broken.py:f", r"SyntaxError.*own_broken\.py, line 1"),
        ("own_broken:f", r"SyntaxError.*own_broken\.py, line 1"),
        ("own_needy:f", "package 'no_such_package', which is not installed"),
        ("own_needy.py:f", "no_such_package"),
    ):
        with pytest.raises(UsageError, match=words):
            recipes.find(target)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("os:system", {}, "is not a task: it lacks a class"),
        ("pathlib:Path", {}, "it lacks reset, step, snapshot, restore, close"),
        ("etude.tasks.seek:Sek", {}, "did you mean 'Seek'"),
        ("etude.tasks.seek:Seek", {"sped": 1}, "unexpected keyword argument 'sped'"),
        (
            "toys:ConfiguredReach",
            {"tolerance": -1},
            "env.options.tolerance must be more than 0",
        ),
        ("toys:ConfiguredReach", {"tolerence": 1}, "did you mean env.options.tolerance?"),
        ("Seek", {}, "write module:Class"),
    ],
)
def test_a_task_that_is_none_is_refused(task: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_task(TaskConfig(task=task, options=options), 2)
    assert words in str(refused.value)


def test_constructors_of_every_kind() -> None:
    for task in ("toys:ConfiguredReach", "etude.tasks.seek:Seek", "toy_envs:ToyEnv"):
        config = TaskConfig(task=task)
        assert make_task(config, 3, threads=2).num_envs == 3
        assert config.exactness().exact


# The base class.


def test_the_shipped_example_keeps_the_contract() -> None:
    findings = check.check_env(lambda rows, threads: Seek(rows, threads), exact_steps=1000)
    assert {finding.verdict for finding in findings} == {"passed"}


def test_an_episode_depends_on_row_and_number_only() -> None:
    one, two = Seek(4), Seek(4)
    one.max_episode_steps, two.max_episode_steps = 3, 3
    one.reset(Key(1))
    two.reset(Key(1))
    for _ in range(3):
        a, b = one.step(np.ones((4, 2), np.float32)), two.step(-np.ones((4, 2), np.float32))
    assert a.truncated.all()
    np.testing.assert_array_equal(a.obs["state"], b.obs["state"])
    assert (a.final_obs["state"] != b.final_obs["state"]).any()


def test_state_keeps_its_memory_and_type() -> None:
    task = Seek(3)
    task.reset(Key(0))
    memory = task.place
    task.place = np.ones((3, 2), np.float32)
    assert task.place is memory
    assert task.place.dtype == np.float64
    task.place = 2.0  # type: ignore[assignment]
    assert (memory == 2.0).all()
    with pytest.raises(UsageError, match=r"Seek\.place has shape \[3, 2\], and the value \[2, 2\]"):
        task.place = np.ones((2, 2))
    with pytest.raises(UsageError, match="3 rows, and the task 4"):
        Seek(4).restore(task.snapshot(), Key(0))


class Sloppy(Seek):
    """Seek with one thing done wrong."""

    wrong = ""

    def advance(self, actions: Array) -> Outcome:
        reward, there, statistics = super().advance(actions)
        if self.wrong == "reward":
            reward = reward[:, None]
        if self.wrong == "statistics":
            statistics = {}
        return Outcome(reward, there, statistics)

    def observe(self) -> Observations:
        obs = super().observe()
        if self.wrong == "names":
            return {"stat": obs["state"]}
        return {"state": obs["state"][:, :3]} if self.wrong == "shape" else obs


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("reward", r"advance returns reward as \[3, 1\]: it must be one number per row, \[3\]"),
        ("statistics", "returns the statistics nothing, but `statistics` declares is_success"),
        ("names", "observe returns stat, but `observations` declares state"),
        ("shape", r"observe returns 'state' as \[3, 3\], but `observations` declares \[3, 4\]"),
    ],
)
def test_the_base_says_what_a_task_gets_wrong(wrong: str, words: str) -> None:
    task = Sloppy(3)
    task.wrong = wrong

    def begin() -> None:
        task.reset(Key(0))
        task.step(np.zeros((3, 2), np.float32))

    with pytest.raises(UsageError, match=words):
        begin()


def test_a_task_without_declarations_is_told() -> None:
    class Bare(ArrayTask):
        reset_rows, advance, observe = Seek.reset_rows, Seek.advance, Seek.observe  # type: ignore

    with pytest.raises(UsageError, match="has no field `observations`: declare it"):
        Bare(2)


# The check.


class Forgetful(Seek):
    """Keeps a number that no snapshot holds."""

    def __init__(self, num_envs: int, threads: int = 1) -> None:
        super().__init__(num_envs, threads)
        self.wind = np.zeros((num_envs, 2))

    def advance(self, actions: Array) -> Outcome:
        self.wind += 0.01
        return super().advance(actions + self.wind)


class Worn(ToyEnv):
    """Pays less with every step it was ever given, which no snapshot holds."""

    def __init__(self, num_envs: int, threads: int = 1) -> None:
        super().__init__(num_envs)
        self.age = 0

    def step(self, actions: Array) -> StepResult:
        self.age += 1
        result = super().step(actions)
        result.reward[:] *= np.float32(0.999**self.age)
        return result


class Shared(Seek):
    """Rows pull at each other."""

    def advance(self, actions: Array) -> Outcome:
        self.place += 0.01 * actions.sum()
        return super().advance(actions)


class Unseeded(Seek):
    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        super().reset_rows(rows, streams)
        self.place[rows] -= np.random.default_rng().uniform(0, 0.1)


class Deaf(Seek):
    """The same episodes whatever the key."""

    def reset(self, key: Key) -> Observations:
        return super().reset(Key(0))

    def restore(self, snapshot: Tree, key: Key) -> None:
        super().restore(snapshot, Key(0))


class Solved(Seek):
    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        super().reset_rows(rows, streams)
        self.place[rows] = self.target[rows]

    def advance(self, actions: Array) -> Outcome:
        return super().advance(actions * 0.1)


class Writing(Seek):
    def advance(self, actions: Array) -> Outcome:
        actions *= 0.5
        return super().advance(actions)


class Sharing(ToyEnv):
    """Snapshots are not copies."""

    def snapshot(self) -> Tree:
        return dict(self.state)


class Scalar(Seek):
    def snapshot(self) -> Tree:
        return {**super().snapshot(), "speed": np.array(0.1)}


class Crashing(Seek):
    def advance(self, actions: Array) -> Outcome:
        raise IndexError("no such thing")


Change = Callable[[StepResult], None]


class Bent(ToyEnv):
    """A toy whose every result is changed."""

    def __init__(self, num_envs: int, change: Change) -> None:
        super().__init__(num_envs)
        self._change = change

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        self._change(result)
        return result


class Lazy(ToyEnv):
    """Finished rows go on from where they ended, and nothing is new about them."""

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        for name, array in result.obs.items():
            array[result.final_envs] = result.final_obs[name]
        return result


class Aliased(ToyEnv):
    """One array for the observations of all steps."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self._obs: Array = np.zeros((num_envs, 4), np.float32)

    def _observe(self) -> Observations:
        self._obs[...] = super()._observe()["state"]
        return {"state": self._obs}


class Endless(ToyEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        object.__setattr__(self.spec, "max_episode_steps", 3)


def put(name: str, value: Callable[[StepResult], Any]) -> Change:
    return lambda result: setattr(result, name, value(result))


def nan_reward(result: StepResult) -> None:
    result.reward[2] = np.nan


def nan_obs(result: StepResult) -> None:
    result.obs["state"][1, 2] = np.inf


BENT: dict[str, tuple[Change, str, str]] = {
    "obs type": (
        put("obs", lambda r: {"state": r.obs["state"].astype(np.float64)}),
        check.OBSERVATIONS,
        "'state' in obs is float64 [3, 4], the spec says float32 [3, 4]",
    ),
    "obs names": (put("obs", lambda r: {}), check.OBSERVATIONS, "obs gives []"),
    "obs nan": (nan_obs, check.OBSERVATIONS, "not finite in row 1, column [2]"),
    "reward type": (put("reward", lambda r: r.reward.astype(float)), check.REWARDS, "float64 [3]"),
    "reward shape": (put("reward", lambda r: r.reward[:, None]), check.REWARDS, "[3, 1]"),
    "reward nan": (nan_reward, check.REWARDS, "the reward of row 2 is not finite"),
    "ending type": (put("truncated", lambda r: r.truncated.astype(int)), check.ENDINGS, "int64"),
    "both": (put("truncated", lambda r: r.terminated.copy()), check.ENDINGS, "at once"),
    "final rows": (put("final_envs", lambda r: r.final_envs[::-1][:1]), check.FINISHED, "ended"),
    "final obs": (put("final_obs", lambda r: r.obs), check.FINISHED, "final_obs is float32 [3, 4]"),
    "statistics": (put("episodes", lambda r: {}), check.STATISTICS, "spec.statistics names"),
    "statistics type": (
        put("episodes", lambda r: {k: v.astype("f4") for k, v in r.episodes.items()}),
        check.STATISTICS,
        "is float32",
    ),
}


def broken(make: check.MakeEnv) -> dict[str, check.Finding]:
    return {f.item: f for f in check.check_env(make, 60, 60) if f.verdict == "failed"}


@pytest.mark.parametrize("case", BENT)
def test_the_check_names_a_bent_result(case: str) -> None:
    change, item, words = BENT[case]
    found = broken(lambda rows, threads: Bent(rows, change))
    assert item in found
    assert words in found[item].problem
    assert found[item].fix.endswith(".")


@pytest.mark.parametrize(
    ("make", "item", "words"),
    [
        (Forgetful, check.SNAPSHOT, "restored in its own instance it differs after 1 steps"),
        (Shared, check.INDEPENDENCE, "changes obs 'state' of other rows at step 1"),
        (Unseeded, check.DETERMINISM, "two resets with one key give different starts"),
        (Deaf, check.DETERMINISM, "another key gives the same starts"),
        (Solved, check.START, "succeeded in their first step"),
        (Writing, check.OWNERSHIP, "wrote into its actions"),
        (Aliased, check.OWNERSHIP, "wrote into the observations of the step before"),
        (Sharing, check.SNAPSHOT, "changed an earlier snapshot"),
        (Scalar, check.SNAPSHOT, "'speed' in the snapshot has no leading row axis"),
        (Lazy, check.RESETS, "went on from where it ended"),
        (Endless, check.LIMIT, "max_episode_steps is 3"),
        (Crashing, check.BUILD, "IndexError: no such thing (test_own.py, line"),
    ],
)
def test_the_check_names_what_is_wrong(make: Any, item: str, words: str) -> None:
    toy = issubclass(make, ToyEnv)
    found = broken(lambda rows, threads: make(rows) if toy else make(rows, threads))
    assert item in found, found
    assert words in found[item].problem
    others = {check.DETERMINISM, check.SNAPSHOT, check.INDEPENDENCE, check.STATISTICS}
    assert set(found) - others <= {item}


def test_a_sound_toy_passes_everything() -> None:
    findings = check.check_env(lambda rows, threads: ToyEnv(rows))
    assert {finding.verdict for finding in findings} == {"passed"}
    assert [finding.item for finding in findings] == list(check.ITEMS)


def test_check_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "own_cart:Cart keeps the contract." in said(["check", "own_cart:Cart"], capsys, 0)
    assert "keeps the contract" in said(["check", "CartPole-v1", "--steps=50"], capsys, 0)
    text = said(["check", f"{__name__}:Forgetful"], capsys, 1)
    assert "FAILED  a snapshot continues bit for bit" in text
    assert "Fix: Put everything that a step reads into snapshot()" in text
    assert "breaks it in 2 of 13" in text
    findings = json.loads(said(["check", "own_cart.py:Cart", "--json"], capsys, 0))
    assert all(finding["verdict"] == "passed" for finding in findings)
    assert "4 not checked" in said(["check", "own_cart:Cart", "--steps=2"], capsys, 0)
    assert "Nearest: CartPole-v1" in said(["check", "CartPol-v1"], capsys, 2)
    assert "no module" in said(["check", "no_such_module:Task"], capsys, 2)
    text = said(["check", "own_cart:Cart", "--options", "forse", "1"], capsys, 2)
    assert "'forse'" in text


def test_a_plan_knows_the_task(folder: Path) -> None:
    recipe = recipes.ppo().model_copy(update={"env": TaskConfig(task="own_cart:Cart")})
    plan = etude.plan(recipe)
    assert plan.shapes["obs/state"]["buffer"][-1] == 2
