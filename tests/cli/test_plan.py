"""The plan is kept: every count, and every byte that can be known."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import etude
import short_recipes
from etude.api import resume, train
from etude.building.build import build, loss_batches
from etude.building.measuring import measured
from etude.cli.options import parse
from etude.cli.plan import PlanCommand
from etude.cli.target import find_target
from etude.core.errors import UsageError
from etude.core.output import duration, size
from etude.core.trees import num_bytes
from etude.envs.mujoco import rendering
from etude.evaluate.record import RecordOptions, record
from etude.planning import recipes
from etude.planning.plan import Plan, compare_plans, make_plan, render
from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from etude.rl.rewards.amp import AMP
from etude.runs.folder import RunFolder
from gates.lib.full import ALONE, BESIDE_SB3
from made_motions import go1_recipe
from toys import changed, tiny_bc, tiny_offline, tiny_reach, tiny_reward_only, toy_dataset

WALK: dict[str, dict[str, Any]] = {
    "policy": {"hidden": (16,)},
    "collector": {"num_envs": 32, "envs_per_group": 16},
    "algorithm": {"minibatch_size": 256},
    "clock": {"total_timesteps": 4_000, "iterations": 2, "cycles": 2},
    "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4, "final_episodes": 4},
}
SHRUNK: dict[str, dict[str, dict[str, Any]]] = {
    "walk-go1": WALK,
    "walk-go1-robust": WALK,
    "walk-go1-rough": WALK,
    "walk-go1-short": {"clock": {"total_timesteps": 3_000}},
    "reach": {
        "collector": {"num_envs": 32, "envs_per_group": 16},
        "algorithm": {"minibatch_size": 256, "update_epochs": 2},
        "clock": {"total_timesteps": 7_000, "iterations": 3, "cycles": 2},
        "evaluation": {"episodes": 16, "num_envs": 16, "envs_per_group": 8},
    },
    "reach-short": {
        "collector": {"num_envs": 32},
        "clock": {"total_timesteps": 6_000, "iterations": 2, "cycles": 3},
        "evaluation": {"every": "1500 steps", "episodes": 16, "num_envs": 16},
    },
    "reach-memory": {
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 256},
        "clock": {"total_timesteps": 4_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "reach-at-scale": {
        "policy": {"hidden": (16,), "units": 16},
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 512},
        "clock": {"total_timesteps": 5_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "reach-at-scale-short": {
        "collector": {"num_envs": 32, "envs_per_group": 8},
        "clock": {"total_timesteps": 5_000, "iterations": 1, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "spread": {
        "collector": {"num_envs": 24, "envs_per_group": 12},
        "clock": {"total_timesteps": 3_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 12, "num_envs": 12, "envs_per_group": 12},
    },
    "sac": {
        "policy": {"hidden": (64, 64)},
        "algorithm": {"train_batches": 5, "warmup_steps": 350},
        "clock": {"total_timesteps": 1_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    },
    "td3": {
        "policy": {"hidden": (64, 64)},
        "algorithm": {"train_batches": 5, "warmup_steps": 0},
        "clock": {"total_timesteps": 700, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    },
    "episodic": {
        "policy": {"hidden": (16,)},
        "algorithm": {"train_batches": 5, "warmup_steps": 1_000},
        "clock": {"total_timesteps": 3_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "episodic-ircr": {
        "policy": {"hidden": (16,)},
        "algorithm": {"train_batches": 5, "warmup_steps": 1_000},
        "clock": {"total_timesteps": 6_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "episodic-short": {"clock": {"total_timesteps": 2_000, "iterations": 2, "cycles": 1}},
    "pick-place": {
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "clock": {"total_timesteps": 3_000, "iterations": 2, "cycles": 3},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 2},
    },
    "pick-place-original": {
        "algorithm": {"rollout_steps": 64, "update_epochs": 1},
        "clock": {"total_timesteps": 3_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    },
    "pick-place-sac": {
        "policy": {"hidden": (16,)},
        "algorithm": {"train_batches": 5, "warmup_steps": 1_000},
        "clock": {"total_timesteps": 3_000, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    },
    "pick-place-anywhere": {
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 128},
        "clock": {"total_timesteps": 2_000, "iterations": 2, "cycles": 3},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "pick-place-short": {"clock": {"total_timesteps": 2_048, "iterations": 2, "cycles": 1}},
    "amp-walk": {
        "policy": {"hidden": (16,)},
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"rollout_steps": 16, "minibatch_size": 128, "update_epochs": 1},
        "rewards": {"hidden": (16,), "replay_capacity": 64, "replay_per_iteration": 32},
        "clock": {"total_timesteps": 1_500, "iterations": 2, "cycles": 2},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "amp-clips": {
        "env": {"max_episode_steps": 30},
        "policy": {"hidden": (16,), "units": 8},
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 128, "update_epochs": 1},
        "rewards": {"hidden": (16,), "replay_capacity": 64, "replay_per_iteration": 32},
        "clock": {"total_timesteps": 1_500, "iterations": 2, "cycles": 2},
    },
    "amp-walk-short": {"clock": {"total_timesteps": 2_048, "iterations": 2, "cycles": 1}},
    "imitate-walk": {
        "env": {"max_episode_steps": 30},
        "policy": {"hidden": (16,)},
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 128},
        "clock": {"total_timesteps": 1_000, "iterations": 2, "cycles": 2},
    },
    "imitate-walk-short": {"clock": {"total_timesteps": 2_048, "iterations": 2, "cycles": 1}},
    "imitate-backflip": {
        "env": {"max_episode_steps": 30},
        "policy": {"hidden": (16,)},
        "collector": {"num_envs": 16, "envs_per_group": 8},
        "algorithm": {"minibatch_size": 128},
        "clock": {"total_timesteps": 1_000, "iterations": 2, "cycles": 2},
    },
    "imitate-all": {
        "env": {"max_episode_steps": 30},
        "policy": {"hidden": (16,)},
        "collector": {"num_envs": 32, "envs_per_group": 16},
        "algorithm": {"minibatch_size": 256},
        "clock": {"total_timesteps": 2_000, "iterations": 2, "cycles": 2},
    },
    "seek-pictures": {
        "collector": {"num_envs": 8, "envs_per_group": 4},
        "algorithm": {"rollout_steps": 8, "minibatch_size": 32, "update_epochs": 1},
        "clock": {"total_timesteps": 400, "iterations": 2, "cycles": 1},
        "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    },
    "ppo": {
        "algorithm": {"rollout_steps": 32, "update_epochs": 2},
        "clock": {"total_timesteps": 4_000, "iterations": 2, "cycles": 2},
        "evaluation": {"every": "1 cycle", "episodes": 4, "num_envs": 4, "envs_per_group": 4},
        "checkpoint": {"every": "5 iterations"},
    },
}
RUNNING: dict[str, dict[str, Any]] = {
    "collector": {"num_envs": 4, "envs_per_group": 2},
    "algorithm": {"rollout_steps": 64, "minibatch_size": 64, "update_epochs": 1},
    "clock": {"total_timesteps": None, "epochs": 2, "cycles": 2, "iterations": 2},
    "evaluation": {"every": "never", "episodes": 1, "num_envs": 1, "envs_per_group": 1},
    "checkpoint": {"every": "11 updates"},
}
SHRUNK |= dict.fromkeys((*BESIDE_SB3, *ALONE), RUNNING) | {"pendulum": SHRUNK["sac"]}


def skip_without_pictures() -> None:
    try:
        rendering.backend()
    except rendering.NoPictures as error:
        pytest.skip(f"draws pictures: {error}")


FROM_DATA: dict[str, Any] = {"rrd_batch_size": 16, "rrd_sample_size": 4}


def shrunk(name: str, folder: Path) -> Recipe:
    """A recipe of the catalog that takes a second or two; datasets are made in `folder`."""
    recipe = short_recipes.find(name)
    if name in ("lunarlander", "bipedalwalker"):
        pytest.importorskip("Box2D", reason="needs the extra gymnasium")
    if recipe.algorithm.kind == "reward-only":
        network = {"reads": ("state",), "hidden": (16,)}
        rrd = recipe.algorithm.rrd.model_dump(mode="json") | FROM_DATA | {"network": network}
        data = {"dataset": str(toy_dataset(folder / "data")), "progress": "progress", "rrd": rrd}
        levels = {"epochs": 2, "cycles": 2, "iterations": 3}
        return changed(recipe, algorithm=data, clock=levels, evaluation={"every": "1 epoch"})
    if name == "offline":
        data = {"dataset": str(toy_dataset(folder / "data")), "train_batches": 10, "batch_size": 32}
        levels = {"epochs": 2, "cycles": 2, "iterations": 3}
        return changed(recipe, algorithm=data, rewards=FROM_DATA, clock=levels)
    few = {"train_batches": 10, "batch_size": 32}
    if name in ("bc", "iql", "offline-pictures"):
        data = {"dataset": str(toy_dataset(folder / "data")), **few}
        return changed(recipe, algorithm=data, clock={"epochs": 2, "cycles": 2, "iterations": 3})
    if name in ("pick-place-bc", "pick-place-pictures"):
        pictured = name == "pick-place-pictures"
        options = RecordOptions(3, fail_share=0.0, image_size=32 if pictured else 0, workers=1)
        if pictured:
            skip_without_pictures()
        record(recipe, folder / "data", options)
        return changed(
            recipe,
            env={"pictures": options.image_size},
            policy={"width": 16, "layers": 1},
            algorithm={"dataset": str(folder / "data"), **few},
            clock={"epochs": 2, "cycles": 1, "iterations": 2},
            evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2},
        )
    if name in ("rlpd", "pick-place-rlpd"):
        shown = short_recipes.find("pick-place-rlpd")
        options = RecordOptions(3, fail_share=0.0, image_size=0, reward="task", workers=1)
        record(shown, folder / "data", options)
        replay = {"rollout_steps": 8, "warmup_steps": 64, "capacity": 2048, "num_critics": 3}
        return changed(
            recipe.replace(env=shown.task),
            collector={"num_envs": 4, "envs_per_group": 4, "threads": 1},
            policy={"hidden": (16,)},
            algorithm={"dataset": str(folder / "data"), **few, **replay},
            clock={"total_timesteps": 256, "cycles": 2, "iterations": 2},
            evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2},
        )
    if name == "walk-go1-student":
        teaching = SHRUNK["walk-go1-rough"]
        rough = changed(short_recipes.find("walk-go1-rough"), **teaching).replace(
            env__observe_velocity=False, policy__actor_reads=("state", "scan", "critic")
        )
        taught = {k: v for k, v in teaching.items() if k not in ("algorithm", "policy")}
        steps = {"rollout_steps": 8, "horizon": 8, "minibatch_size": 32, "update_epochs": 2}
        steps["teacher"] = str(train(rough, folder / "teacher").path)
        return changed(recipe, policy={"hidden": (16,), "units": 16}, algorithm=steps, **taught)
    if name in ("track", "track-g1"):
        return changed(
            go1_recipe(name, folder),
            policy={"hidden": (16,)},
            collector={"num_envs": 16, "envs_per_group": 8, "threads": 1},
            algorithm={"rollout_steps": 8, "minibatch_size": 64, "update_epochs": 2},
            clock={"total_timesteps": 512, "cycles": 2, "iterations": 1},
            evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2, "final_episodes": 2},
        )
    if name not in SHRUNK:
        pytest.fail(f"add a short form of the recipe '{name}' to SHRUNK")
    return changed(recipe, **SHRUNK[name])


@pytest.mark.parametrize("name", short_recipes.names())
def test_every_recipe_does_what_its_plan_says(name: str, tmp_path: Path) -> None:
    recipe = shrunk(name, tmp_path)
    run = train(recipe, tmp_path / "run")
    plan = json.loads((run.path / "plan.json").read_text())
    assert run.summary()["counts"] == plan["counts"]
    assert plan["counts"] == etude.plan(recipe).to_json()["counts"]
    assert len(run.rows()) == plan["counts"]["log_rows"]
    final = (run.path / "checkpoints" / "final").resolve()
    on_disk = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
    # The text of the manifest is not known before.
    assert plan["bytes"]["checkpoint"] == pytest.approx(on_disk, rel=0.01, abs=1000)


@pytest.mark.parametrize("name", short_recipes.names())
def test_bytes_in_memory_are_exact(name: str, tmp_path: Path) -> None:
    recipe = shrunk(name, tmp_path)
    planned = etude.plan(recipe).bytes
    with RunFolder.create(tmp_path / "run", recipes.dump(recipe), "", {}, {}) as folder:
        parts = build(resolve(recipe), folder)
        algorithm: Any = parts.loop.algorithm
        measure = {"ppo": _memory, "dagger": _memory, "reward-only": _reward_memory}
        measure["bc"] = _cloned_memory
        found = measure.get(recipe.algorithm.kind, _replay_memory)(algorithm)
        assert {part: planned[part] for part in found} == found
        parts.loop.collector.collect(algorithm.broadcast(parts.loop.clock), 0)
        groups = parts.loop.collector.state_dict().get("groups", {})
        assert planned["snapshots"] == pytest.approx(num_bytes(groups), rel=0.02)
        parts.close()


def _memory(ppo: Any) -> dict[str, int]:
    arrays = [array for buffer in ppo.buffers for array in buffer.arrays.values()]
    return {
        "buffer": sum(array.nbytes for array in arrays),
        "normaliser": sum(b.nbytes for b in ppo.policy.normalisers.state_dict().values()),
        "model": ppo.optimizer.flat.data.nbytes,
        "gradient": ppo.optimizer.flat.grad.nbytes,
        "optimizer": num_bytes(ppo.state_dict()["optimizer"]),
        **_style_memory(getattr(ppo, "rewards", None)),
    }


def _style_memory(source: Any) -> dict[str, int]:
    if not isinstance(source, AMP):
        return {}
    learned = source.flat.data.nbytes + source.flat.grad.nbytes
    learned += num_bytes(source.optimizer.state_dict())
    return {
        "discriminator": learned + sum(buffer.nbytes for buffer in source.network.buffers()),
        "replay_windows": sum(ring.windows.nbytes for ring in source.rings),
        "reference_windows": source.reference.nbytes,
    }


def _reward_memory(algorithm: Any) -> dict[str, int]:
    flat = algorithm.rrd.flat
    return {"model": flat.data.nbytes, "gradient": flat.grad.nbytes}


def _cloned_memory(algorithm: Any) -> dict[str, int]:
    flat, averaged, adam = algorithm.optimizer.flat, algorithm.average, algorithm.optimizer
    return {
        "model": flat.data.nbytes,
        "gradient": flat.grad.nbytes,
        "optimizer": adam.mean.nbytes + adam.square.nbytes,
        **({} if averaged is None else {"average": averaged.data.nbytes}),
    }


def _replay_memory(algorithm: Any) -> dict[str, int]:
    state = algorithm.state_dict()
    learned = {name: part for name, part in state.items() if name not in ("stores", "rewards")}
    return {
        "model": algorithm.actor_optimizer.flat.data.nbytes,
        "learner_state": num_bytes(learned),
        "learner_undo": sum(x.nbytes for x in algorithm.changing()),
        "reward_model": 2 * num_bytes(state["rewards"]),
    }


def test_a_plan_of_millions_of_log_rows() -> None:
    few, many = (
        etude.plan(tiny_reach(rows, clock={"iterations": 1}, evaluation={"every": "never"}))
        for rows in (2_000, 2_000_000)
    )
    assert many.counts["log_rows"] == 2_000_000
    assert abs(many.bytes["checkpoint"] - few.bytes["checkpoint"]) < 10_000


def test_a_budget_is_rounded_down_and_both_figures_are_told() -> None:
    plan = etude.plan(tiny_reach(clock={"total_timesteps": 1_000}))
    assert plan.counts["timesteps"] == 768
    assert plan.counts["iterations"] == 3
    text = render(plan)
    assert "1,000 steps are rounded down to 3 whole iterations, 768 steps." in text
    assert "The last cycle is short: 1 of 2 iterations." in text
    with pytest.raises(UsageError, match="at least"):
        etude.plan(tiny_reach(clock={"total_timesteps": 200}))


def test_levels_instead_of_a_budget() -> None:
    levels = {"total_timesteps": None, "epochs": 3, "cycles": 4, "iterations": 2}
    plan = etude.plan(tiny_reach(clock=levels))
    assert plan.counts["iterations"] == 24
    assert plan.counts["cycles"] == plan.counts["log_rows"] == 12
    assert plan.counts["timesteps"] == 24 * 256
    assert plan.levels["cycles_per_epoch"] == 4
    assert not [note for note in plan.notes if "short" in note or "asked" in note]


@pytest.mark.parametrize(
    ("section", "field", "value", "works"),
    [
        ("algorithm", "minibatch_size", 100, "algorithm.minibatch_size 64 or 128"),
        ("collector", "envs_per_group", 7, "collector.envs_per_group 4 or 8"),
        ("algorithm", "horizon", 3, "algorithm.horizon 2 or 4"),
        ("learner", "shards", 3, "learner.shards 2 or 4"),
        ("collector", "rows", 33, "collector.num_envs 32 or"),
    ],
)
def test_what_does_not_divide_is_refused(
    section: str, field: str, value: int, works: str, tmp_path: Path
) -> None:
    recipe = tiny_reach(**{section: {field: value}})
    with pytest.raises(UsageError, match=r"does not divide") as refused:
        etude.plan(recipe)
    assert works in str(refused.value)
    with pytest.raises(UsageError):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing starts before it adds up


def test_maxima_are_called_maxima() -> None:
    limited = tiny_reach(
        algorithm={"target_kl": 0.01},
        evaluation={"every": "20 updates"},
        checkpoint={"every": "10 updates"},
    )
    plan = etude.plan(limited)
    assert set(plan.at_most) == {
        "updates",
        "evaluations",
        "evaluation_episodes",
        "checkpoints",
    }
    assert "at most" in render(plan)
    assert set(etude.plan(tiny_reach(algorithm={"target_kl": 0.01})).at_most) == {"updates"}
    assert etude.plan(tiny_reach()).at_most == {}


def test_planning_takes_no_memory_for_the_buffer_or_the_model() -> None:
    """A buffer of 10^11 steps and a network of 10^8 parameters can be planned anywhere."""
    huge = tiny_reach(
        policy={"hidden": (8_192, 8_192)},
        collector={"num_envs": 2**13, "envs_per_group": 64},
        algorithm={"rollout_steps": 2**24, "minibatch_size": 2**30},
        clock={"total_timesteps": 10**14},
    )
    plan = etude.plan(huge)
    assert plan.geometry["buffer_steps"] == 2**37
    assert plan.counts["iterations"] == 10**14 // 2**37
    assert plan.bytes["model"] > 4 * 10**8
    assert plan.bytes["buffer"] > 10**13


def test_shapes_are_those_of_the_arrays() -> None:
    plan = etude.plan(tiny_reach(algorithm={"horizon": 4}))
    assert plan.shapes["actions"] == {
        "dtype": "float32",
        "buffer": [64, 4, 7],
        "minibatch": [16, 4, 7],
    }
    assert plan.data["gradient_samples"] == plan.counts["updates"] * 64


def test_a_gpu_is_not_promised() -> None:
    assert etude.plan(tiny_reach()).exactness["exact"]
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no GPU"):
            etude.plan(tiny_reach(learner={"device": "cuda"}))


def test_measured_seconds_add_up() -> None:
    seconds = etude.plan(tiny_reach(), measure=True).seconds
    assert seconds["total"] == pytest.approx(sum(v for k, v in seconds.items() if k != "total"))
    assert min(seconds.values()) > 0
    assert {"collect", "train", "test", "save"} < seconds.keys()
    assert "s: 4 iterations." in etude.plan(tiny_reach(), measure=True).notes[-1]


@pytest.mark.parametrize(
    ("seconds", "steps", "note", "parts"),
    [
        (2.0, 4096, "2 steps of one group; an iteration does not fit", {"collect", "test"}),
        (1.5, 8, "of 400 episodes", {"collect", "train", "test"}),
    ],
)
def test_a_measurement_ends_in_time_and_says_what_was_timed(
    seconds: float, steps: int, note: str, parts: set[str]
) -> None:
    recipe = recipes.find("ppo").replace(
        env__task="toy_envs:SlowEnv",
        collector__num_envs=4,
        algorithm__rollout_steps=steps,
        algorithm__minibatch_size=16,
        clock__total_timesteps=8 * 4 * steps,
        evaluation__episodes=400,
        evaluation__num_envs=4,
        evaluation__envs_per_group=4,
    )
    run = resolve(recipe)
    begin = time.perf_counter()
    planned = measured(run, make_plan(run), limit=seconds)
    assert time.perf_counter() - begin < 2 * seconds + 1
    assert note in planned.notes[-1]
    assert parts < planned.seconds.keys()
    assert planned.seconds["collect"] > 8 * steps * 0.02 * 0.9


def test_variants_side_by_side() -> None:
    plans: list[tuple[str, Plan]] = [
        (str(rows), etude.plan(tiny_reach(collector={"num_envs": rows}))) for rows in (32, 64)
    ]
    table = compare_plans("collector.num_envs", plans)
    assert "rows" in table
    assert "buffer steps" in table
    assert "group rows" not in table  # nothing differs there


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    collector = {"num_envs": 1, "envs_per_group": 1}
    sizes = {"rollout_steps": 64, "minibatch_size": 64}
    clock = {"total_timesteps": 64, "iterations": 1}
    words = render(etude.plan(tiny_reach(collector=collector, algorithm=sizes, clock=clock)))
    assert "1 epoch of 1 cycle (1 cycle in all)" in words
    assert "cycle: 1 iteration (" in words
    assert "collect: 1 environment (1 group of 1)" in words


def test_sizes_and_times_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 * 1024, 2**50)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1,024.0 TiB",
    ]
    assert [duration(s) for s in (0.04, 59, 60, 3_599, 3_600, 86_399, 90_000)] == [
        "0.0 s",
        "59.0 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "23 h 59 min",
        "1 d 1 h",
    ]


@pytest.mark.parametrize("unit", ["updates", "steps"])
def test_intervals_of_a_run_with_warm_up_are_counted(unit: str, tmp_path: Path) -> None:
    """More often than every iteration is once per iteration that moves the counter at all."""
    every = {"updates": "4 updates", "steps": "100 steps"}[unit]
    recipe = changed(shrunk("episodic-short", tmp_path), checkpoint={"every": every})
    run = train(recipe, tmp_path / "run")
    assert run.summary()["counts"] == etude.plan(recipe).counts


def test_a_lagging_run_takes_gae_and_a_kl_limit() -> None:
    own = {"target_kl": 0.01, "advantages": "gae"}
    plan = etude.plan(changed(short_recipes.find("reach-at-scale-short"), algorithm=own))
    assert plan.at_most["updates"] == "target_kl may end an update early"
    assert plan.counts["updates"] == (plan.counts["iterations"] - 2) * 4
    assert any("first 2 iterations only collect" in note for note in plan.notes)


def test_agents_are_not_parted_by_groups() -> None:
    recipe = changed(recipes.find("spread"), collector={"envs_per_group": 32})
    with pytest.raises(UsageError, match=r"collector\.envs_per_group 24 or 48"):
        etude.plan(recipe)


def test_a_plan_says_where_groups_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_reach(collector={"kind": "ray", "actors": 2, "threads": 3})
    assert "on Ray actors: 2 of 3 threads, local cluster" in etude.plan(recipe).lines[0]
    assert etude.plan(recipe).counts == etude.plan(tiny_reach()).counts
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install etude\[ray\]"):
        etude.plan(recipe)


def test_bytes_of_what_is_gathered_and_of_what_a_level_reads() -> None:
    """32 numbers a step: 25 of the observation, 7 of the action."""
    made = etude.plan(tiny_reach(4, learner={"shards": 2}))
    step = 32 * 4
    assert made.sizes == {
        "buffer": 256 * step,
        "group": 8 * 8 * step,
        "minibatch": 64 * step,
        "shard": 32 * step,
        "batch": 64 * step,
        "iteration": 8 * 64 * step,
        "cycle": 2 * 8 * 64 * step,
        "epoch": 2 * 8 * 64 * step,
    }
    assert (
        "in bytes: buffer 32.0 KiB, rollout of a group 8.0 KiB, minibatch 8.0 KiB, a shard's part "
        "of it 4.0\nKiB\n"
        "gradient steps read 8.0 KiB per batch, 64.0 KiB per iteration, 128.0 KiB per cycle, 128.0 "
        "KiB per\nepoch\n"
    ) in render(made)


def test_a_replays_group_is_what_it_collects_in_an_iteration() -> None:
    """25 + 7 numbers, 4 groups; the buffer holds 1,024 steps, an iteration is 16 x 8."""
    sizes = etude.plan(short_recipes.find("episodic-short")).sizes
    assert sizes["buffer"] == 1_024 * 32 * 4
    assert sizes["group"] == 16 * 8 * 32 * 4 // 4


@pytest.mark.parametrize(("name", "batches"), [("reach-short", 25), ("seek-pictures", 100)])
def test_losses_of_pictures_are_printed_less_often(name: str, batches: int) -> None:
    if name == "seek-pictures":
        skip_without_pictures()
    assert loss_batches(resolve(recipes.find(name))) == batches


@pytest.mark.parametrize("num_envs", [1, 7, 100, 257, 1000])
def test_groups_and_minibatches_follow_the_number_of_environments(num_envs: int) -> None:
    """With an option, and from Python; sizes that divide already stay."""
    recipe, _ = find_target(["reach", "--collector.num-envs", str(num_envs)])
    geometry = resolve(recipe).geometry
    assert geometry.num_envs == num_envs
    assert num_envs % geometry.envs_per_group == 0
    assert recipes.reach().replace("collector.num_envs", num_envs) == recipe
    group = {1: 1, 7: 7, 100: 100, 257: 257, 1000: 125}[num_envs]
    assert geometry.envs_per_group == group
    notes = " ".join(etude.plan(recipe).notes)
    assert f"With collector.num_envs {num_envs:,}: collector.envs_per_group {group}" in notes


def test_only_sizes_that_do_not_divide_follow() -> None:
    usual = recipes.reach()
    twice = usual.replace("collector.num_envs", 2 * usual.collector.num_envs)
    assert twice.collector.envs_per_group == usual.collector.envs_per_group
    assert twice.algorithm == usual.algorithm
    assert not any("With collector.num_envs" in note for note in etude.plan(usual).notes)
    # What is given stays, and is refused with sizes that work.
    given = ["--collector.num-envs=100", "--collector.envs-per-group=64"]
    with pytest.raises(UsageError, match=r"64 does not divide .* 100\. Sizes that work: .* 50 or"):
        resolve(find_target(["reach", *given])[0])
    given = ["--collector.num-envs=100", "--algorithm.minibatch-size=512"]
    with pytest.raises(UsageError, match=r"minibatch_size 512 does not divide"):
        resolve(parse("plan", PlanCommand, given, _default(*given)).recipe)
    shards = ["--collector.num-envs=12", "--learner.shards=4"]
    recipe = parse("plan", PlanCommand, shards, _default(*shards)).recipe
    assert resolve(recipe).geometry.num_groups == 4


def _default(*options: str) -> PlanCommand:
    return PlanCommand(recipe=find_target(["reach", *options])[0])


@pytest.mark.parametrize("make", [tiny_offline, tiny_bc, tiny_reward_only])
def test_offline_runs_count_updates(make: Any, tmp_path: Path) -> None:
    kind = ("act",) if make is tiny_bc else ()
    recipe = make(tmp_path, *kind, epochs=2, iterations=2, every="1 epoch")
    batches = resolve(recipe).loops.batches_per_iteration
    counted = recipe.replace("clock.total_timesteps", 3 * batches + 1)
    planned = etude.plan(counted)
    assert (planned.counts["iterations"], planned.counts["updates"]) == (3, 3 * batches)
    notes = " ".join(planned.notes)
    assert "clock.total_timesteps counts gradient updates" in notes
    assert f"{3 * batches + 1} updates are rounded down to 3 whole iterations" in notes
    with pytest.raises(UsageError, match=f"less than one iteration of {batches} gradient updates"):
        etude.plan(recipe.replace("clock.total_timesteps", batches - 1))


def test_an_offline_run_gets_a_larger_budget_of_updates(tmp_path: Path) -> None:
    recipe = tiny_bc(tmp_path, "act", epochs=1, iterations=1, every="1 epoch")
    batches = resolve(recipe).loops.batches_per_iteration
    options = ["bc", f"--clock.total-timesteps={batches}"]
    assert find_target(options)[0].clock.epochs is None
    for name, budget in (("long", 2), ("short", 1)):
        train(recipe.replace("clock.total_timesteps", budget * batches), tmp_path / name)
    said: list[str] = []
    with pytest.raises(UsageError, match=rf"for {batches} updates: .* {2 * batches} or more"):
        resume(tmp_path / "short", batches)
    resumed = resume(tmp_path / "short", 2 * batches, say=said.append)
    assert any(
        f"from {batches} to {2 * batches} updates at step {batches}" in text for text in said
    )
    assert resumed.summary()["counts"]["updates"] == 2 * batches
