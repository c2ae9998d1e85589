"""Behaviour cloning: windows of demonstrations, losses by hand, policies learned, the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.importing import finish, new_store
from etude.data.store.episodes import EpisodeStore
from etude.data.store.geometry import OBS
from etude.data.store.labels import Labels
from etude.data.store.views import EpisodesOf
from etude.models.chunks import ChunkPolicy, ChunkPolicyConfig
from etude.models.imitation import Demonstrations, imitation_loss, imitation_window
from etude.models.policies import PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.rl.bc import BCConfig

ACTION = ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0))
SPEC = EnvSpec({"state": ArraySpec((4,)), "image": ArraySpec((16, 16, 3), "uint8")}, ACTION, 50)


def seek_dataset(path: Path, episodes: int, image: bool = False) -> Path:
    """Straight ways of a point to a target, which `seek` observes; and nothing to a picture."""
    fields = {OBS + "state": ArraySpec((4,)), "actions": ArraySpec((2,))}
    if image:
        fields[OBS + "image"] = ArraySpec((16, 16, 3), "uint8")
    labels, generator = Labels(), np.random.default_rng(0)
    with new_store(path, fields, 50) as store:
        for number in range(episodes):
            place, target = generator.uniform(-1, 0, 2), generator.uniform(0.1, 1, 2)
            seen, acted = [], []
            while np.linalg.norm(target - place) >= 0.1:
                seen.append(np.hstack([place, target - place]))
                wanted = np.clip((target - place) / 0.1, -1, 1)
                acted.append(np.clip(wanted + generator.normal(0, 0.3, 2), -1, 1))
                place = place + 0.1 * acted[-1]
            seen.append(np.hstack([place, target - place]))
            obs: dict[str, Array] = {"state": np.array(seen, np.float32)}
            if image:
                obs["image"] = np.full((len(seen), 16, 16, 3), number, np.uint8)
            rewards = np.zeros(len(acted), np.float32)
            rewards[-1] = 1.0
            store.append_episode(obs, np.array(acted, np.float32), rewards, terminated=True)
            labels.add(f"take {number}", "straight", success=True, task="seek")
        finish(store, {"source": "a test", "format": "made"}, labels)
    return path


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seek_dataset(tmp_path_factory.mktemp("bc") / "seek", 60, image=True)


def test_windows_against_whole_episodes(dataset: Path) -> None:
    store = EpisodeStore.open(dataset)
    every = EpisodesOf(store, np.arange(store.num_episodes), ACTION)
    generator = np.random.default_rng(3)
    windows = every.sample_windows(generator, 200, ("state",), 2, 1, 5)
    places, offsets = every._draw(np.random.default_rng(3), 200)
    starts = ends = 0
    for i, (number, offset) in enumerate(zip(places, offsets, strict=True)):
        steps, _ = every.episode(int(number))
        last = len(steps.actions) - 1
        for j, at in enumerate(range(offset - 2, offset + 2)):
            assert np.array_equal(
                windows.obs["state"][i, j], steps.obs["state"][max(0, min(at, last))]
            )
        for j, at in enumerate(range(offset, offset + 5)):
            assert windows.valid[i, j] == (at <= last)
            assert np.array_equal(windows.actions[i, j], steps.actions[min(at, last)])
        starts, ends = starts + (offset < 2), ends + (offset + 5 > last)
    assert starts > 5
    assert ends > 5
    store.close()


def shown(num: int, steps: int, actions: int) -> Demonstrations:
    generator = torch.Generator().manual_seed(0)
    obs = {
        "state": torch.randn(num, steps, 4, generator=generator),
        "image": torch.randint(0, 256, (num, steps, 16, 16, 3), generator=generator).byte(),
    }
    taken = torch.rand(num, actions, 2, generator=generator) * 2 - 1
    valid = torch.rand(num, actions, generator=generator) > 0.3
    return Demonstrations(obs, taken, valid)


@pytest.mark.parametrize("kind", ["mlp", "squashed", "deterministic", "lstm"])
def test_the_loss_is_the_squared_error_of_what_the_policy_would_do(kind: str) -> None:
    """Of a recurrent policy, when it starts at the window's start and is led through it."""
    policy = make_policy(PolicyConfig(kind=kind, hidden=(8,), units=8), SPEC, Key(0))
    past, ahead, actions = imitation_window(policy, 6)
    demonstrated = shown(5, past + 1 + ahead, actions)
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(5).items()}
    errors = []
    with torch.no_grad():
        for t in range(actions):
            obs = {name: x[:, t] for name, x in demonstrated.obs.items()}
            acted = policy.act(obs, state, None)
            state = acted.state
            errors.append((acted.actions - demonstrated.actions[:, t]).square().mean(-1))
        expected = torch.stack(errors, 1)[demonstrated.valid].mean()
        loss = imitation_loss(policy, demonstrated, np.random.default_rng(0))
    torch.testing.assert_close(loss, expected)


def chunked(**fields: Any) -> ChunkPolicy:
    config = ChunkPolicyConfig(
        **{"chunk": 4, "width": 16, "heads": 2, "layers": 1, "actor_reads": ("state",), **fields}
    )
    policy = make_policy(config, SPEC, Key(1))
    assert isinstance(policy, ChunkPolicy)
    return policy


def test_act_s_loss_is_the_absolute_error_within_the_episode() -> None:
    policy, demonstrated = chunked(), shown(6, 1, 4)
    with torch.no_grad():
        chunk = policy._predict(policy.prepare(demonstrated.obs), None)
        expected = (chunk - demonstrated.actions).abs().mean(-1)[demonstrated.valid].mean()
        loss = imitation_loss(policy, demonstrated, np.random.default_rng(0))
    torch.testing.assert_close(loss, expected)


def test_flow_s_loss_by_hand_and_its_steps() -> None:
    policy, demonstrated = chunked(kind="flow", flow_steps=3), shown(6, 1, 4)
    generator = np.random.default_rng(7)
    noise = torch.from_numpy(generator.standard_normal((6, 4, 2), dtype=np.float32))
    time = torch.from_numpy(generator.random(6, dtype=np.float32))
    with torch.no_grad():
        tokens = policy._tokens(policy.prepare(demonstrated.obs))
        t = time[:, None, None]
        velocity = policy._velocity(tokens, (1 - t) * noise + t * demonstrated.actions, time)
        errors = (velocity - (demonstrated.actions - noise)).square().mean(-1)
        loss = imitation_loss(policy, demonstrated, np.random.default_rng(7))
        torch.testing.assert_close(loss, errors[demonstrated.valid].mean())
        x = noise
        for step in range(3):
            x = x + policy._velocity(tokens, x, torch.full((6,), step / 3)) / 3
        features = policy.prepare(demonstrated.obs)
        torch.testing.assert_close(policy._predict(features, noise.reshape(6, 8)), x)


@pytest.mark.parametrize("ensemble", [0.0, 0.5, None])
def test_temporal_ensembling_against_all_predictions_kept(ensemble: float | None) -> None:
    policy = chunked(ensemble=ensemble, history=2)
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(3).items()}
    frames = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(2))
    kept = []
    for t, frame in enumerate(frames):
        before = frames[max(t - 1, 0)]  # before the first observation there was the same
        with torch.no_grad():
            read = {"state": torch.stack([before, frame], 1)}
            kept.append(policy._predict(policy.prepare(read), None).clamp(-1, 1))
            acted = policy.act({"state": frame}, state, None)
        state = acted.state
        said = [kept[s][:, t - s] for s in range(max(0, t - 3), t + 1)]  # the oldest first
        rate = 0.0 if ensemble is None else ensemble
        weights = [np.exp(-rate * i) for i in range(len(said))]
        expected = sum(w * x for w, x in zip(weights, said, strict=True)) / sum(weights)
        torch.testing.assert_close(acted.actions, said[-1] if ensemble is None else expected)


@pytest.mark.parametrize("execute", [1, 3, 9])
def test_flow_carries_out_one_prediction_at_a_time(execute: int) -> None:
    """Rows that began an episode later take their predictions later."""
    policy = chunked(kind="flow", flow_steps=2, execute=execute)
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(2).items()}
    noise = torch.from_numpy(policy.noise(np.random.default_rng(4), 10, 2))
    frames = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(2))
    most, began, kept = min(execute, 4), [0, 0], []
    for t, frame in enumerate(frames):
        if t == 5:  # a new episode of the second row
            state = {n: torch.cat([x[:1], torch.zeros_like(x[1:])]) for n, x in state.items()}
            began[1] = 5
        with torch.no_grad():
            features = policy.prepare({"state": frame[:, None]})
            kept.append(policy._predict(features, noise[t]).clamp(-1, 1))
            acted = policy.act({"state": frame}, state, noise[t])
        state = acted.state
        for row in range(2):
            ahead = (t - began[row]) % most
            torch.testing.assert_close(acted.actions[row], kept[t - ahead][row, ahead])


LINE = EnvSpec({"state": ArraySpec((2,))}, ActionSpec("box", (-1.0,), (1.0,)), 50)


def played(policy: ChunkPolicy, episodes: int = 64, steps: int = 24) -> Array:
    """[episodes, steps] sampled actions of a policy that always sees the same."""
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(episodes).items()}
    noise = torch.from_numpy(policy.noise(np.random.default_rng(1), steps, episodes))
    actions = []
    for each in noise:
        with torch.no_grad():
            acted = policy.act({"state": torch.zeros(episodes, 2)}, state, each)
        state = acted.state
        actions.append(acted.actions[:, 0])
    return torch.stack(actions, 1).numpy()


def near_a_mode(actions: Array) -> float:
    return float((np.abs(np.abs(actions) - 0.6) < 0.15).mean())


def changes_of_side(actions: Array) -> float:
    return float((np.diff(np.sign(actions)) != 0).mean())


def test_sampled_chunks_are_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demonstrations go left or right; the mean of both is neither."""

    def two_ways(self: ChunkPolicy, features: Any, noise: torch.Tensor) -> torch.Tensor:
        return 0.6 * noise[:, :1].sign()[..., None].expand(-1, self.config.chunk, 1)

    monkeypatch.setattr(ChunkPolicy, "_predict", two_ways)
    small = {"chunk": 16, "width": 16, "heads": 2, "layers": 1, "actor_reads": ("state",)}
    policy = make_policy(ChunkPolicyConfig(kind="flow", **small), LINE, Key(0))
    assert isinstance(policy, ChunkPolicy)
    actions = played(policy)
    assert near_a_mode(actions) == 1.0
    assert changes_of_side(actions) < 0.1  # at a new prediction alone


@pytest.mark.rotated
def test_flow_learns_two_ways_and_takes_one() -> None:
    small = {"chunk": 8, "width": 32, "heads": 2, "layers": 1, "actor_reads": ("state",)}
    policy = make_policy(ChunkPolicyConfig(kind="flow", **small), LINE, Key(0))
    assert isinstance(policy, ChunkPolicy)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    chance = np.random.default_rng(0)
    for _ in range(400):
        ways = torch.from_numpy(chance.choice([-0.6, 0.6], (64, 1, 1)).astype(np.float32))
        seen = {"state": torch.zeros(64, 1, 2)}
        valid = torch.ones(64, 8, dtype=torch.bool)
        demonstrated = Demonstrations(seen, ways.expand(64, 8, 1).contiguous(), valid)
        optimizer.zero_grad()
        imitation_loss(policy, demonstrated, chance).backward()
        optimizer.step()
    actions = played(policy)
    assert near_a_mode(actions) > 0.7
    assert changes_of_side(actions) < 0.12
    assert 0.25 < (actions > 0).mean() < 0.75


@pytest.mark.parametrize("kind", ["act", "flow"])
def test_a_chunk_policy_sees_and_is_rebuilt(kind: str) -> None:
    policy = chunked(kind=kind, actor_reads=("image", "state"), history=2)
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(2).items()}
    assert state["past_image"].dtype == torch.uint8
    obs = {name: x[:, 0] for name, x in shown(2, 1, 1).obs.items()}
    actions = policy.act(obs, state, None).actions
    assert not torch.equal(
        actions, policy.act({**obs, "image": obs["image"] // 2}, state, None).actions
    )
    again = policy_from_contract(policy.contract(), dict(policy.state_dict()))
    assert torch.equal(again.act(obs, state, None).actions, actions)
    with pytest.raises(UsageError, match="even multiple"):
        chunked(width=18, heads=4)


def recipe_of(dataset: Path, **fields: Any) -> etude.Recipe:
    small = {
        "algorithm__dataset": str(dataset),
        "algorithm__train_batches": 40,
        "algorithm__batch_size": 64,
        "algorithm__learning_rate": 3e-3,
        "env": {"kind": "task"},
        "clock__epochs": 2,
        "clock__cycles": 1,
        "clock__iterations": 10,
        "evaluation__final_episodes": 0,
    }
    policy = fields.pop("policy", {"kind": "mlp", "hidden": (64, 64)})
    policy = {"actor_reads": ("state",), **policy}
    return etude.recipes.bc().replace(policy=policy, **{**small, **fields})


def test_drawing_ahead_changes_no_bit(dataset: Path, tmp_path: Path) -> None:
    runs = []
    for prefetch in (True, False):
        short = {"algorithm__prefetch": prefetch, "algorithm__train_batches": 5}
        short |= {"clock__epochs": 1, "clock__iterations": 2}
        recipe = recipe_of(dataset, env=None, **short)
        runs.append(etude.train(recipe, tmp_path / str(prefetch)).fingerprint())
    assert runs[0] == runs[1]


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["mlp", "lstm", "squashed", "act", "flow"])
def test_a_policy_is_cloned_and_the_plan_is_kept(kind: str, dataset: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"kind": kind, "actor_reads": ("state",)}
    if kind == "mlp":
        chosen["hidden"] = (128, 128)
    if kind == "lstm":
        chosen |= {"hidden": (32,), "units": 32}
    if kind in ("act", "flow"):
        chosen |= {"chunk": 4, "width": 32, "heads": 2, "layers": 1}
    recipe = recipe_of(
        dataset,
        policy=chosen,
        algorithm__average=0.9 if kind == "flow" else 0.0,
        algorithm__horizon=8,
        algorithm__train_batches=40 if kind in ("mlp", "flow") else 20,
    )
    plan = etude.plan(recipe)
    run = etude.train(recipe, tmp_path / "run")
    summary = run.summary()
    assert summary["counts"]["updates"] == plan.counts["updates"]
    success = run.evaluate(50, checkpoint="latest")["eval/success_rate"]
    assert success >= 0.9
    losses = run.curves("train/imitation_loss")["train/imitation_loss"][1]
    assert losses[-1] < losses[0]


@pytest.mark.rotated
def test_pictures_and_vectors_of_a_dataset_are_read_where_none_are_named(
    dataset: Path, tmp_path: Path
) -> None:
    """And without an environment the policy is held to the episodes that were held out."""
    recipe = recipe_of(dataset, env=None, policy={"actor_reads": (), "critic_reads": ()})
    run = etude.train(recipe, tmp_path / "run")
    assert set(run.recipe.policy.actor_reads) == {"image", "state"}
    losses = run.curves("eval/imitation_loss")["eval/imitation_loss"][1]
    assert len(losses) == 2
    assert losses[-1] < 0.2
    text = json.loads((run.path / "plan.json").read_text())
    assert text["geometry"]["window_actions"] == 1


@pytest.mark.rotated
def test_ppo_and_sac_go_on_from_a_cloned_policy(dataset: Path, tmp_path: Path) -> None:
    for kind, name in (("mlp", "ppo"), ("squashed", "sac")):
        policy = {
            "kind": kind,
            "hidden": (128, 128),
            "actor_reads": ("state",),
            "critic_reads": ("state",),
        }
        cloned = etude.train(recipe_of(dataset, policy=policy), tmp_path / f"bc-{name}")
        clock = {"total_timesteps": 512, "cycles": 1, "iterations": 1}
        recipe = getattr(etude.recipes, name)().replace(
            env={"kind": "task"}, policy=policy, start_from=str(cloned.path), clock=clock,
            collector__num_envs=16, collector__envs_per_group=8, evaluation__final_episodes=0,
            algorithm__rollout_steps=16, algorithm__learning_rate=1e-6,
        )  # fmt: skip
        started = etude.train(recipe, tmp_path / name)
        assert started.evaluate(50, checkpoint="latest")["eval/success_rate"] >= 0.8


@pytest.mark.rotated
def test_choices_are_cloned(tmp_path: Path) -> None:
    """A pole that is pushed to the side it falls to stays up."""
    gymnasium = pytest.importorskip("gymnasium")
    labels, env = Labels(), gymnasium.make("CartPole-v1")
    fields = {OBS + "state": ArraySpec((4,)), "actions": ArraySpec((1,), "int64")}
    with new_store(tmp_path / "data", fields, 500) as store:
        for number in range(8):
            seen, acted, over = [env.reset(seed=number)[0]], [], False
            while not over:
                acted.append(int(3 * seen[-1][2] + seen[-1][3] > 0))
                obs, _, fallen, late, _ = env.step(acted[-1])
                seen.append(obs)
                over = fallen or late
            states, choices = np.array(seen, np.float32), np.array(acted)[:, None]
            rewards = np.ones(len(acted), np.float32)
            store.append_episode({"state": states}, choices, rewards, terminated=fallen)
            labels.add(f"take {number}", "pole", success=True, task="pole")
        finish(store, {"source": "a test", "format": "made"}, labels)
    cart = {"kind": "gym", "id": "CartPole-v1"}
    recipe = recipe_of(tmp_path / "data", env=cart)
    run = etude.train(recipe, tmp_path / "run")
    assert run.evaluate(10, checkpoint="latest")["eval/mean_reward"] > 400
    with pytest.raises(UsageError, match="only the environment defines"):
        etude.plan(recipe.replace(env=None))


def test_what_cannot_be_cloned_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no dataset"):
        etude.plan(recipe_of(dataset, algorithm__dataset=""))
    with pytest.raises(UsageError, match="one shard"):
        etude.plan(recipe_of(dataset, learner__shards=2))
    assert BCConfig(dataset="x").schedules(1.0) == {"learning_rate": pytest.approx(1e-4)}
