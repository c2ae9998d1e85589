"""Gradient steps as compiled functions: parity with eager ones, the cache, fallback, resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_iql import choices
from test_iql import recipe_of as iql_recipe
from test_off_policy import DIMS, OBS, plain_agent, random_batch, random_noise
from test_rlpd import BOX, kept
from test_rlpd import agent_of as rlpd_of

import etude
from etude.core import compiled
from etude.core.compiled import NotCompiled, folder, load_or_compile
from etude.core.errors import NonFinite, UsageError
from etude.core.trees import digest
from etude.rl.compiled import CompiledStep
from etude.rl.off_policy import OffPolicy, example_batch
from golden_runs import RUNS
from test_exact_resume import killed_runs

SIZE = 32
needs_compiler = pytest.mark.skipif(not compiled.compiler(), reason="no C++ compiler")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache folder for all tests, since compiling takes half a minute."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        yield place


def agent_of(kind: str, scratch: Path) -> Any:
    """An agent of a kind with all that its step has: RLPD draws the critics of its targets."""
    if kind != "rlpd":
        return plain_agent(kind)
    data = scratch / "ones"
    if not data.exists():
        kept(data, BOX, [(np.ones((5, OBS)), np.ones((4, DIMS)), np.ones(4))])
    return rlpd_of(data, num_critics=4, actor_interval=3)


def compiling(agent: OffPolicy) -> OffPolicy:
    """The agent with compiled steps, which are not waited for."""
    agent.compiled = CompiledStep(
        agent, [example_batch(agent.policy, SIZE, multi_step=False)], [random_noise(agent, SIZE)]
    )
    return agent


def learn(agent: OffPolicy, number: int) -> dict[str, float]:
    return agent.learn([random_batch(SIZE, number)], [random_noise(agent, SIZE, number)])


def bits(agent: OffPolicy) -> str:
    return digest({str(i): x for i, x in enumerate(agent.changing())})


@pytest.mark.rotated
@needs_compiler
@pytest.mark.parametrize("kind", ["sac", "td3", "rlpd", "iql", "xqc"])
def test_compiled_steps_agree_with_eager_ones(
    kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 30 steps with delayed parts; also by a library from the cache, without compiling."""
    eager, fast = agent_of(kind, tmp_path), compiling(agent_of(kind, tmp_path))
    files = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(files).is_relative_to(folder())  # Before the compiling thread needs it.
    for number in range(30):
        expected, found = learn(eager, number), learn(fast, number)
        assert fast.compiled is not None
        assert found == pytest.approx(expected, abs=1e-4, rel=1e-4)
    for ours, theirs in zip(fast.changing(), eager.changing(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert folder().is_relative_to(cache)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == files
    assert {path.suffix for path in folder().iterdir()} == {".so", ".json"}

    monkeypatch.delattr("etude.core.compiled._compile")
    again = compiling(agent_of(kind, tmp_path))
    for number in range(30):
        learn(again, number)
    assert again.compiled is not None
    assert bits(again) == bits(fast)

    before = bits(again)
    bad = random_batch(SIZE)
    bad.rewards[0] = float("nan")
    with pytest.raises(NonFinite, match=r"the loss of the critics \(shard 0\)"):
        again.learn([bad], [random_noise(again, SIZE)])
    assert bits(again) == before
    assert again.num_updates == 30


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled.compiler.cache_clear()
    yield
    compiled.compiler.cache_clear()


def test_without_a_compiler_steps_are_eager(
    no_compiler: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eager, other = plain_agent("sac"), compiling(plain_agent("sac"))
    assert learn(other, 0) == learn(eager, 0)
    assert learn(other, 1) == learn(eager, 1)
    said = capsys.readouterr().err
    assert said.count("Gradient steps are eager, not compiled: no C++ compiler was found") == 1
    assert said.endswith("(install g++, or set CXX).\n")


def test_a_run_does_not_change_between_eager_and_compiled(no_compiler: None, cache: Path) -> None:
    """A run that fell back stays eager; one that was compiled is refused without a compiler."""
    fallen = compiling(plain_agent("sac"))
    learn(fallen, 0)
    state = _state(fallen)
    assert state["step"] == "eager"
    resumed = compiling(plain_agent("sac"))
    _load(resumed, state)
    assert resumed.compiled is None
    resumed = compiling(plain_agent("sac"))
    _load(resumed, state | {"step": "compiled"})
    with pytest.raises(UsageError, match=r"this run were compiled, .* \(no C\+\+ compiler"):
        learn(resumed, 1)


def _state(agent: Any) -> Any:
    stores, agent.stores = agent.stores, []
    state = agent.state_dict()
    agent.stores = stores
    return state


def _load(agent: Any, state: Any) -> None:
    stores, agent.stores = agent.stores, []
    agent.load_state_dict(state)
    agent.stores = stores


@pytest.mark.skipif(not compiled.compiler(), reason="no C++ compiler")
def test_a_cache_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder().stat().st_mode & 0o777 == 0o700
    folder().chmod(0o777)
    with pytest.raises(NotCompiled, match="can be written by others"):
        load_or_compile({}, lambda: pytest.fail("compiled"), 1)


@pytest.mark.rotated
@needs_compiler
def test_a_compiled_run_is_killed_and_resumed(cache: Path, tmp_path: Path) -> None:
    recipe = RUNS["sac"](tmp_path).replace(learner__step="compiled")
    run = etude.train(recipe, tmp_path / "compiling")  # The killed runs find the library.
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["learner"]["step"] == compiled.description()
    hits = killed_runs(recipe, tmp_path, kills=5, seed=11)
    assert sum(hits.values()) == 5


@pytest.mark.rotated
@needs_compiler
def test_a_compiled_run_of_a_dataset(cache: Path, tmp_path: Path) -> None:
    """IQL, which has three optimizers and no warm-up to compile in."""
    recipe = iql_recipe(choices(tmp_path / "data", 200))
    runs = {
        step: etude.train(recipe.replace(learner__step=step), tmp_path / step)
        for step in ("eager", "compiled")
    }
    manifest = json.loads((runs["compiled"].path / "manifest.json").read_text())
    assert manifest["learner"]["step"] == compiled.description()
    losses = [[row["train/critic_loss"] for row in run.rows()] for run in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    states = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    assert float(np.mean(runs["compiled"].policy("latest").act(states))) > 0.55


@needs_compiler
def test_files_of_a_killed_compilation_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next compilation, unless another one is at work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "from etude.core import compiled\nimport time\n"
        "with compiled._scratch() as place:\n"
        "    (place / 'step.so').touch()\n"
        "    print(place, flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().decode().strip())
        with compiled._scratch() as ours:
            assert theirs.is_dir()
            assert ours.is_dir()
        assert (theirs / "step.so").exists()
        other.kill()
    assert theirs.is_dir()
    with compiled._scratch() as ours:
        assert not theirs.exists()
        assert ours.is_dir()
    assert not any(folder().iterdir())


def test_recipes_say_what_compiles() -> None:
    with pytest.raises(UsageError, match=r"learner.step compiled is for .*sac.* not for ppo"):
        etude.plan(etude.recipes.find("reach").replace(learner__step="compiled"))
    recipe = etude.recipes.find("pick-place-sac").replace(learner__step="compiled")
    assert any("Gradient steps are compiled by" in n for n in etude.plan(recipe).notes) == bool(
        compiled.compiler()
    )
