"""The style reward and its discriminator: formulas, and on which step a reward lands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import Array, Fragment
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.trees import copy_arrays, digest
from etude.data.segments import StepWindows, WindowRing, join
from etude.envs.mujoco.style import StyleWindow
from etude.models.networks import make_generator
from etude.models.policies import PolicyConfig
from etude.models.reward_networks import Discriminator
from etude.rl.rewards.amp import (
    AMP,
    LARGEST,
    STYLE,
    AMPConfig,
    Demonstrations,
    Drawn,
    discriminator_loss,
    style_rewards,
)
from etude.tasks.humanoid import CLOSELY
from toy_envs import StyleEnv
from toys import Trainer, TwoRanks, make_trainer

SMALL: dict[str, Any] = {
    "hidden": (16, 8),
    "batch_size": 32,
    "updates": 3,
    "replay_capacity": 64,
    "replay_per_iteration": 24,
}


def make_amp(shards: int = 1, reference: Array | None = None, **config: Any) -> AMP:
    """A discriminator of the toy's windows whose logits differ from window to window."""
    if reference is None:
        reference = np.random.default_rng(0).normal(3.0, 2.0, (50, 3, 3)).astype(np.float32)
    chosen = AMPConfig(**{**SMALL, **config})
    network = Discriminator(reference.shape[1:], chosen.hidden, make_generator(Key(3)))
    with torch.no_grad():
        network.weights()[-1].mul_(300.0)
    return AMP(chosen, network, reference, shards, torch.device("cpu"))


def make_styled(amp: AMP, *, envs_per_group: int = 2, **options: Any) -> Trainer:
    envs = [StyleEnv(envs_per_group, first_row=first) for first in range(0, 8, envs_per_group)]
    return make_trainer(
        envs=envs, rewards=amp, shards=amp.shards, envs_per_group=envs_per_group, **options
    )


def parts_of(trainer: Trainer) -> list[Fragment]:
    """What the trainer collects next, a fragment per shard."""
    cut, fragments = trainer.ppo.geometry, trainer.collect()
    per = len(fragments) // cut.shards
    return [
        join(fragments[s * per : (s + 1) * per], trainer.ppo.buffers[0], cut.shard_envs(s))
        for s in range(cut.shards)
    ]


def windows_led_to(part: Fragment, first_row: int) -> Array:
    """[rows, steps, 3, 3], from what the toy says of itself: one more step of the same episode."""
    rows, steps = part.rewards.shape
    elapsed, episode = part.obs["state"][..., 0], part.obs["state"][..., 1]
    row = np.repeat(np.arange(first_row, first_row + rows), steps)
    flat = StyleEnv.frames(row, episode.reshape(-1), elapsed.reshape(-1) + 1)
    return flat.reshape(rows, steps, 3, 3)


def style_of(amp: AMP, windows: Array) -> Array:
    """-log(max(1 - sigmoid(D), 1e-4)) in float64, one window at a time."""
    flat = torch.from_numpy(windows.reshape(-1, 3, 3))
    with torch.no_grad():
        logits = torch.cat([amp.network(window[None]) for window in flat]).double().numpy()
    rewards = -np.log(np.maximum(1.0 - 1.0 / (1.0 + np.exp(-logits)), 1e-4))
    return rewards.reshape(windows.shape[:-2])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_style_reward_lands_on_the_step_that_led_to_its_window(shards: int) -> None:
    amp = make_amp(shards, task_weight=0.25, style_weight=2.0)
    trainer = make_styled(amp)
    for _ in range(2):
        parts = parts_of(trainer)
        found, metrics = amp.relabel_rollouts(parts)
        styles = []
        for s, (part, rewards) in enumerate(zip(parts, found, strict=True)):
            assert part.terminated[:, :-1].any()
            assert part.truncated[:, :-1].any()
            windows = windows_led_to(part, trainer.ppo.geometry.shard_envs(s).start)
            styles.append(style_of(amp, windows))
            expected = 0.25 * part.rewards + 2.0 * styles[s]
            np.testing.assert_allclose(rewards, expected, rtol=1e-4, atol=1e-4)
            for wrong in (rewards[::-1], np.roll(rewards, 1, axis=1), np.roll(rewards, -1, axis=1)):
                assert (np.abs(wrong - expected) > 1e-2).mean() > 0.5
        assert metrics["amp/style_reward"] == pytest.approx(np.mean(styles), rel=1e-4)
        trainer.iterate()


@pytest.mark.parametrize("horizon", [1, 4])
def test_advantages_are_made_of_these_rewards(horizon: int) -> None:
    """Without a future the return of a step is its reward, in the order of the segments."""
    amp = make_amp(2, task_weight=0.0)
    options = {"gamma": 0.0, "gae_lambda": 0.0, "normalise_rewards": False}
    trainer = make_styled(amp, horizon=horizon, **options)
    parts = parts_of(trainer)
    expected = [style_of(amp, windows_led_to(part, 4 * s)) for s, part in enumerate(parts)]
    trainer = make_styled(amp, horizon=horizon, **options)
    trainer.ingest()
    for shard, style in zip(trainer.ppo.shards, expected, strict=True):
        returns = shard.returns.numpy()
        np.testing.assert_allclose(returns, style.reshape(-1, horizon), rtol=1e-3, atol=1e-3)


def test_windows_never_span_a_reset() -> None:
    trainer = make_styled(make_amp())
    (part,) = parts_of(trainer)
    windows = StepWindows(part, STYLE)
    rows, steps = (x.reshape(-1) for x in np.indices(part.rewards.shape))
    everything = windows.at(rows, steps)
    np.testing.assert_array_equal(everything, windows_led_to(part, 0).reshape(-1, 3, 3))
    drawn = windows.draw(np.random.default_rng(1), 500)
    for some in (everything, drawn):
        assert (some[:, :, :2] == some[:, :1, :2]).all()  # one row, one episode
        assert (np.diff(some[:, :, 2], axis=1) == 1).all()
    assert len(np.unique(drawn.reshape(500, -1), axis=0)) > 100  # of 128 steps


def test_rewards_are_finite_where_the_logit_is_not_small() -> None:
    logits = torch.tensor([-200.0, -3.0, 0.0, 2.0, 9.0, 9.3, 200.0], dtype=torch.float64)
    found = style_rewards(logits).numpy()
    small = 1.0 / (1.0 + np.exp(np.minimum(logits.numpy(), 50.0)))  # 1 - sigmoid
    np.testing.assert_allclose(found, -np.log(np.maximum(small, 1e-4)), rtol=1e-12, atol=1e-15)
    assert found[-1] == LARGEST == pytest.approx(9.2103, abs=1e-4)


def small_case() -> tuple[Discriminator, Drawn]:
    """A network and windows in float64, with a normaliser that does something."""
    stream = np.random.default_rng(4)
    network = Discriminator((2, 3), (5, 4), make_generator(Key(1)))
    seen = {"count": np.asarray(10.0), "mean": stream.normal(size=3), "m2": stream.uniform(5, 9, 3)}
    network.normaliser.absorb(seen)
    network.double()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.from_numpy(stream.normal(0.0, 0.3, p.shape)))
    drawn = Drawn(*(torch.from_numpy(stream.normal(0.5, 1.0, (7, 2, 3))) for _ in range(2)))
    return network, drawn


def layers(network: Discriminator) -> tuple[list[Array], list[Array]]:
    arrays = [p.detach().numpy() for p in network.layers.parameters()]
    return arrays[0::2], arrays[1::2]


def by_hand(network: Discriminator, windows: torch.Tensor) -> tuple[Array, Array]:
    """Logits [n] and their gradients [n, inputs] of an MLP of ReLUs, in numpy."""
    (w0, w1, w2), (b0, b1, b2) = layers(network)
    moments = network.normaliser
    spread = np.sqrt(moments.m2.numpy() / moments.count.item() + 1e-8)
    x = ((windows.numpy() - moments.mean.numpy()) / spread).reshape(len(windows), -1)
    first = x @ w0.T + b0
    second = np.maximum(first, 0.0) @ w1.T + b1
    logits = np.maximum(second, 0.0) @ w2.T + b2
    slopes = [w2[0] * (s > 0) @ w1 * (f > 0) @ w0 for f, s in zip(first, second, strict=True)]
    return logits[:, 0], np.stack(slopes)


def test_the_loss_is_the_formula() -> None:
    network, drawn = small_case()
    config = AMPConfig(gradient_penalty=5.0, logit_penalty=0.01, weight_decay=1e-4)
    loss, metrics = discriminator_loss(network, drawn, config)
    agent, _ = by_hand(network, drawn.agent)
    demo, slopes = by_hand(network, drawn.demo)
    matrices, _ = layers(network)
    told = -np.log(1.0 - 1.0 / (1.0 + np.exp(-agent))).mean()
    told += -np.log(1.0 / (1.0 + np.exp(-demo))).mean()
    steepness = (slopes**2).sum(1).mean()
    expected = 0.5 * told + 5.0 * steepness + 0.01 * (matrices[-1] ** 2).sum()
    expected += 1e-4 * sum((w**2).sum() for w in matrices)
    # The normaliser applies its moments rounded to float32.
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    named = dict(zip(AMP.METRICS, metrics.tolist(), strict=True))
    assert named["amp/gradient_penalty"] == pytest.approx(steepness, rel=1e-6)
    assert named["amp/agent_accuracy"] == pytest.approx((agent < 0).mean())
    assert named["amp/demo_accuracy"] == pytest.approx((demo > 0).mean())
    assert named["amp/agent_logit"] == pytest.approx(agent.mean(), rel=1e-6)
    assert named["amp/demo_logit"] == pytest.approx(demo.mean(), rel=1e-6)


def test_the_gradient_penalty_is_that_of_finite_differences() -> None:
    network, drawn = small_case()
    inputs, h = network.inputs(drawn.demo), 1e-6
    _, slopes = network.slopes(inputs)
    with torch.no_grad():
        columns = torch.eye(inputs.shape[1], dtype=torch.float64)
        by_column = [
            (network.logits_of(inputs + h * e) - network.logits_of(inputs - h * e)) / (2 * h)
            for e in columns
        ]
    expected = torch.stack(by_column, 1).square().sum(1)
    torch.testing.assert_close(slopes.detach(), expected, rtol=1e-6, atol=1e-9)


def test_every_parameter_feels_the_penalty_as_finite_differences_do() -> None:
    """The way back through the slope: the gradient of the whole loss by every weight."""
    network, drawn = small_case()
    config, h = AMPConfig(gradient_penalty=5.0), 1e-6
    discriminator_loss(network, drawn, config)[0].backward()
    without = AMPConfig(gradient_penalty=0.0)
    plain = torch.autograd.grad(
        discriminator_loss(network, drawn, without)[0], list(network.parameters())
    )
    for p, other in zip(network.parameters(), plain, strict=True):
        assert p.grad is not None
        flat, gradient = p.data.view(-1), p.grad.view(-1)
        for i in range(len(flat)):
            value, ends = float(flat[i]), []
            for side in (-h, h):
                flat[i] = value + side
                ends.append(discriminator_loss(network, drawn, config)[0].item())
            flat[i] = value
            assert float(gradient[i]) == pytest.approx((ends[1] - ends[0]) / (2 * h), abs=1e-5)
        if p.ndim == 2:
            assert not torch.allclose(p.grad, other)


def test_a_ring_keeps_the_last_and_draws_each_as_often() -> None:
    ring = WindowRing(5, (1, 1))
    for first, num in ((0, 3), (3, 4), (7, 5), (12, 1)):
        ring.add(np.arange(first, first + num, dtype=np.float32).reshape(-1, 1, 1))
        held = set(ring.windows.flatten()[: len(ring)].tolist())
        assert held == set(range(max(0, first + num - 5), first + num))
    assert (len(ring), ring.count) == (5, 13)
    drawn = ring.draw(np.random.default_rng(0), 20_000).astype(int).reshape(-1)
    counts = np.bincount(drawn, minlength=13)[8:]
    assert (np.abs(counts - 4_000) < 4 * math.sqrt(20_000 * 0.2 * 0.8)).all()
    other = WindowRing(5, (1, 1))
    other.load_state_dict(copy_arrays(ring.state_dict()))
    for one in (ring, other):
        one.add(np.full((2, 1, 1), 99.0, np.float32))
    assert digest(ring.state_dict()) == digest(other.state_dict())


def test_half_of_a_batch_is_replayed() -> None:
    amp = make_amp(2)
    trainer = make_styled(amp)
    trainer.iterate()
    assert [ring.count for ring in amp.rings] == [12, 12]
    amp.rings[1].windows.fill_(-1.0)
    amp.relabel_rollouts(parts_of(trainer))
    drawn = amp._draw(1, Key(0))
    assert drawn.agent.shape == drawn.demo.shape == (16, 3, 3)
    assert (drawn.agent[8:] == -1.0).all()
    assert (drawn.agent[:8, :, 0] >= 4).all()  # rows of the second shard
    known = {row.tobytes() for row in amp.reference}
    assert all(row.tobytes() in known for row in drawn.demo.numpy())


def test_the_normaliser_weighs_policy_and_reference_alike() -> None:
    amp = make_amp(1, replay_per_iteration=64)
    trainer = make_styled(amp)
    trainer.iterate()
    kept, count = amp.rings[0].windows.numpy().reshape(-1, 3).astype(float), 64 * 3
    reference = amp.reference.reshape(-1, 3).astype(float)
    mean = (2 * reference.mean(0) + kept.mean(0)) / 3  # once at the start, and once again
    second = (2 * (reference**2).mean(0) + (kept**2).mean(0)) / 3
    state = amp.network.normaliser
    assert float(state.count) == 3 * count
    np.testing.assert_allclose(state.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(state.m2 / state.count, second - mean**2, rtol=1e-9)


def test_two_clouds_are_told_apart() -> None:
    stream = np.random.default_rng(0)
    reference = stream.normal(1.0, 1.0, (400, 2, 2)).astype(np.float32)
    amp = make_amp(reference=reference, learning_rate=3e-3, gradient_penalty=0.1, hidden=(32,))
    others = torch.from_numpy(stream.normal(-1.0, 1.0, (4_000, 2, 2)).astype(np.float32))
    demos = torch.from_numpy(stream.normal(1.0, 1.0, (1_000, 2, 2)).astype(np.float32))
    for i in range(150):
        some = slice(i * 20, (i + 1) * 20)
        demo = torch.from_numpy(reference[stream.integers(0, 400, 20)])
        metrics = amp.learn([Drawn(others[some], demo)])
    with torch.no_grad():
        fooled = (amp.network(others[3_000:]) > 0).float().mean()
        missed = (amp.network(demos) < 0).float().mean()
    # The clouds overlap: the best there is errs with Phi(-2) = 2.3 %.
    assert float(fooled) < 0.05
    assert float(missed) < 0.05
    assert metrics["amp/demo_logit"] > 0 > metrics["amp/agent_logit"]


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "policy": dict(trainer.ppo.policy.state_dict()),
        "ppo": trainer.ppo.state_dict(),
        "collector": trainer.collector.state_dict(),
        "clock": trainer.clock.state_dict(),
    }


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_resume_is_exact(kind: str) -> None:
    def fresh(threads: int = 1) -> Trainer:
        policy = PolicyConfig(kind=kind, hidden=(8,), units=8)  # type: ignore[arg-type]
        return make_styled(make_amp(2), policy=policy, horizon=4, threads=threads)

    whole, other = fresh(), fresh(threads=3)
    for _ in range(6):  # more than the rings hold
        whole.iterate()
        other.iterate()
    assert digest(state_of(whole)) == digest(state_of(other))
    first, second = fresh(), fresh()
    for _ in range(3):
        first.iterate()
    saved = copy_arrays(state_of(first))
    second.ppo.load_policy(saved["policy"])
    second.ppo.load_state_dict(saved["ppo"])
    second.collector.load_state_dict(saved["collector"])
    second.clock.load_state_dict(saved["clock"])
    for _ in range(3):
        second.iterate()
    assert digest(state_of(second)) == digest(state_of(whole))


def test_the_discriminators_gradient_steps_are_batches_too() -> None:
    trainer = make_styled(make_amp(updates=3), update_epochs=2)
    batches = trainer.iterate()
    assert len(batches) == 3 + 2 * 4
    assert all("amp/loss" in batch.values for batch in batches[:3])
    assert all("train/approx_kl" in batch.values for batch in batches[3:])


def test_rings_are_gathered_before_the_state_is_read() -> None:
    amp, ranks = make_amp(2), TwoRanks()
    amp.ranks, amp.local_shards, amp.rings = ranks, ranks.part(2), amp.rings[:1]
    amp.rings[0].count = 3
    assert list(amp.state_dict()["rings"]) == ["000000"]
    assert ranks.exchanges == 0
    amp.gather()
    assert [ring["count"] for ring in amp.state_dict()["rings"].values()] == [3, 3]


def test_another_reference_is_refused_on_resume() -> None:
    state = make_amp().state_dict()
    other = make_amp(reference=np.ones((5, 3, 3), np.float32))
    with pytest.raises(UsageError, match="not the one this run began with"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("field", "value", "works"),
    [("batch_size", 31, "30 or 32"), ("replay_capacity", 65, "64 or 66")],
)
def test_sizes_that_do_not_divide_are_refused(field: str, value: int, works: str) -> None:
    with pytest.raises(UsageError, match=works):
        make_amp(2, **{field: value})
    with pytest.raises(UsageError, match="use at most that"):
        make_amp(replay_per_iteration=65)


def test_what_is_not_finite_is_named_before_it_is_learned() -> None:
    amp = make_amp()
    before = amp.flat.data.clone()
    good = torch.zeros(4, 3, 3)
    bad = good.clone()
    bad[1, 2, 0] = math.nan
    for drawn, where in (
        (Drawn(bad, good), "a window of the policy"),
        (Drawn(good, bad), "a window of the reference"),
    ):
        with pytest.raises(NonFinite, match=where) as caught:
            amp.learn([drawn])
        assert set(caught.value.arrays) == {"shard0_agent", "shard0_demo"}
        assert torch.equal(amp.flat.data, before)
    with torch.no_grad():
        amp.network.weights()[0][0, 0] = math.nan
    with pytest.raises(NonFinite, match="the logit of a window of the policy"):
        amp.learn([Drawn(good + 1.0, good)])
    trainer = make_styled(amp)
    with pytest.raises(NonFinite, match=r"the style reward of environment \d, step \d"):
        trainer.ingest()


def test_demonstrations_are_drawn_as_their_motions_are_practised() -> None:
    """A motion with few windows that is practised most is most of what the judge is shown."""
    motions = np.repeat([0, 1, 2], [40, 8, 2])[np.random.default_rng(1).permutation(50)]
    windows = np.zeros((50, 3, 3), np.float32)
    windows[:, 0, 0], windows[:, 0, 1] = motions, np.arange(50)
    part = parts_of(make_styled(make_amp()))[0]
    practised = np.zeros((*part.rewards.shape, 1), np.float32)
    practised[:, 4:] = 2.0  # of 16 steps: motion 2 three quarters of the time, motion 1 never
    part.obs["motion"] = practised
    drawn = Demonstrations(windows, motions).draw(Key(0).generator(), 8000, part)
    share = np.bincount(drawn[:, 0, 0].astype(int), minlength=3) / 8000
    np.testing.assert_allclose(share, [0.25, 0.0, 0.75], atol=0.02)
    # Within a motion every window is as likely as any other.
    counts = np.bincount(drawn[:, 0, 1].astype(int), minlength=50)
    assert (counts[motions == 2] > 0.4 * 0.75 * 8000).all()
    assert counts[motions == 0].min() > 0.5 * 0.25 * 8000 / 40


def test_the_humanoid_says_which_clip_a_window_is_of() -> None:
    pytest.importorskip("pybullet_data", reason="the clips come with pybullet")
    env = CLOSELY.replace(motion=("walk", "run"), style_window=4, order="in turn").build(4)
    style = env.ability(StyleWindow)
    assert style is not None
    obs, windows, motions = env.reset(Key(0)), style.style_windows(), style.style_motions()
    env.close()
    assert obs["motion"].tolist() == [[0.0], [1.0], [0.0], [1.0]]
    assert len(motions) == len(windows)
    assert set(motions.tolist()) == {0, 1}
    for row, window in enumerate(obs["style"]):
        found = np.abs(windows - window).max(axis=(1, 2)).argmin()
        assert motions[found] == row % 2
