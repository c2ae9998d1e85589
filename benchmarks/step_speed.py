"""Time of one off-policy gradient step: Etude eager and compiled, bare torch, and sbx (JAX).

    python benchmarks/step_speed.py [--kinds sac td3 rlpd] [--hidden 128 256] [--no-bare]

Every side takes steps on minibatches that are prepared, of 256 transitions with 32 observations and
6 actions, in one process on one thread. The sides take turns; the figures are medians of processor
time over the rounds, in milliseconds. Bare torch is a hand-written step with the same networks,
without a check of its values, eager and by `torch.compile`. sbx takes 100 steps in one call, as it
does where many steps follow a rollout. The first run compiles for minutes.

The figures go to benchmarks/step_speed.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch.nn import functional

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.compiled import CompiledStep
from etude.rl.off_policy import OffPolicy, example_batch
from etude.rl.rewards.given import GIVEN
from etude.rl.rlpd import RLPD, RLPDConfig
from etude.rl.sac import SAC, SACConfig
from etude.rl.sampling import Batch
from etude.rl.td3 import TD3, TD3Config
from gates.lib import report

RESULTS = Path(__file__).with_name("step_speed.json")
OBS, ACTIONS, SIZE, STEPS = 32, 6, 256, 100
BOX = ActionSpec("box", (-1.0,) * ACTIONS, (1.0,) * ACTIONS)
SPEC = EnvSpec({"state": ArraySpec((OBS,))}, BOX, 1000)
Side = Callable[[], Any]


class Replayless(RLPD):
    """RLPD without a dataset, which a prepared minibatch does not need."""

    def setup(self) -> None:
        SAC.setup(self)


def etude_learner(kind: str, hidden: int) -> OffPolicy:
    config = PolicyConfig(
        kind="deterministic" if kind == "td3" else "squashed",
        hidden=(hidden, hidden),
        activation="relu",
        critic_reads=("state",),
        layer_norm="critic" if kind == "rlpd" else "off",
    )
    policy: Any = make_policy(config, SPEC, Key(0))
    parts: Any = (policy, [None], GIVEN, Key(1), torch.device("cpu"))
    if kind == "rlpd":
        return Replayless(RLPDConfig(dataset="none"), *parts)
    return TD3(TD3Config(), *parts) if kind == "td3" else SAC(SACConfig(), *parts)


def minibatch() -> Batch:
    obs, after = ({"state": torch.randn(SIZE, OBS)} for _ in range(2))
    ended = torch.rand(SIZE) < 0.01
    return Batch(obs, torch.rand(SIZE, ACTIONS) * 2 - 1, torch.randn(SIZE), ended, after)


def etude_side(kind: str, hidden: int, compiled: bool) -> Side:
    learner = etude_learner(kind, hidden)
    batch, noise = minibatch(), torch.randn(learner.noise_draws, SIZE, ACTIONS)
    if compiled:
        learner.compiled = CompiledStep(learner, [example_batch(learner.policy, SIZE)], [noise])
        learner.learn([batch], [noise])
        if learner.compiled is None:
            raise SystemExit("Etude's step could not be compiled.")
    return lambda: learner.learn([batch], [noise])


class Bare:
    """A hand-written gradient step on flat vectors; see the module's docstring."""

    def __init__(self, kind: str, hidden: int) -> None:
        self.kind, self.count = kind, 0
        self.num = 10 if kind == "rlpd" else 2
        heads = ACTIONS if kind == "td3" else 2 * ACTIONS
        inputs = OBS + ACTIONS
        self.actor_shapes = [(OBS, hidden), (hidden,), (hidden, hidden), (hidden,)]
        self.actor_shapes += [(hidden, heads), (heads,)]
        layers = ((inputs, hidden), (hidden, hidden), (hidden, 1))
        self.critic_shapes: list[tuple[int, ...]] = []
        for i, (n, m) in enumerate(layers):
            norm = [(self.num, 1, m)] * 2 if kind == "rlpd" and i < 2 else []
            self.critic_shapes += [(self.num, n, m), (self.num, 1, m), *norm]
        actor, critics = (
            torch.randn(sum(map(math.prod, shapes))) * 0.05
            for shapes in (self.actor_shapes, self.critic_shapes)
        )
        zeros = torch.zeros_like
        self.state = [actor, zeros(actor), zeros(actor), critics, zeros(critics), zeros(critics)]
        self.state += [critics.clone(), actor.clone(), *torch.zeros(3, 1).unbind()]
        batch = minibatch()
        self.data = [batch.obs["state"], batch.actions, batch.rewards]
        self.data += [batch.terminated.float(), batch.next_obs["state"]]
        self.data += [torch.randn(2, SIZE, ACTIONS)]

    def _parts(self, flat: torch.Tensor, shapes: list[Any]) -> list[torch.Tensor]:
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def act(self, flat: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor) -> Any:
        p = self._parts(flat, self.actor_shapes)
        x = torch.addmm(p[1], obs, p[0]).relu()
        out = torch.addmm(p[5], torch.addmm(p[3], x, p[2]).relu(), p[4])
        if self.kind == "td3":
            return out.tanh(), torch.zeros(())
        mean, log_std = out.chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        actions = (mean + log_std.exp() * noise).tanh()
        density = -(log_std + 0.5 * noise * noise).sum(-1)
        return actions, density - (1 - actions * actions + 1e-6).log().sum(-1)

    def q(self, flat: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor, num: int) -> Any:
        p = [part[:num] for part in self._parts(flat, self.critic_shapes)]
        x = torch.cat([obs, actions], -1).expand(num, -1, -1)
        while len(p) > 2:
            weight, bias, *p = p
            x = torch.baddbmm(bias, x, weight)
            if self.kind == "rlpd":
                scale, shift, *p = p
                x = functional.layer_norm(x, x.shape[-1:]) * scale + shift
            x = x.relu()
        return torch.baddbmm(p[1], x, p[0]).squeeze(-1)

    def adam(self, p: Any, g: Any, m: Any, v: Any, count: Any) -> None:
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        scale = 3e-4 * (1 - 0.999**count).sqrt() / (1 - 0.9**count)
        p.sub_(scale * m / (v.sqrt() + 1e-8))

    def step(self, acts: bool, count: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One gradient step; `acts`: also of the actor."""
        actor, am, av, critics, cm, cv, target, actor_target, alpha, lm, lv = tensors[:11]
        obs, taken, rewards, ended, after, noise = tensors[11:]
        td3, rate = self.kind == "td3", alpha.exp()
        with torch.no_grad():
            chosen, density = self.act(actor_target if td3 else actor, after, noise[1])
            if td3:
                chosen = (chosen + (0.2 * noise[1]).clamp(-0.5, 0.5)).clamp(-1, 1)
            value = self.q(target, after, chosen, 2).amin(0) - (0 if td3 else rate * density)
            wanted = rewards + 0.99 * value * (1 - ended)
        flat = critics.detach().requires_grad_()
        loss = (self.q(flat, obs, taken, self.num) - wanted).square().mean(-1).sum()
        self.adam(critics, torch.autograd.grad(loss, flat)[0], cm, cv, count)
        found = [loss.detach()]
        if acts:
            own = actor.detach().requires_grad_()
            chosen, density = self.act(own, obs, noise[0])
            estimates = self.q(critics, obs, chosen, 1 if td3 else self.num)
            q = estimates.mean(0) if self.kind == "rlpd" else estimates.amin(0)
            loss = (-q if td3 else rate.detach() * density - q).mean()
            self.adam(actor, torch.autograd.grad(loss, own)[0], am, av, count)
            found.append(loss.detach())
            if not td3:
                self.adam(alpha, -(density.detach().mean(0, True) - ACTIONS), lm, lv, count)
        if acts or not td3:
            target.lerp_(critics, 0.005)
            actor_target.lerp_(actor, 0.005)
        return tuple(found)

    def side(self, compiled: bool) -> Side:
        every = {"td3": 2, "rlpd": 5}.get(self.kind, 1)
        functions: dict[bool, Any] = {}
        count = torch.zeros((), dtype=torch.float64)
        if compiled:
            from torch.fx.experimental.proxy_tensor import make_fx

            for acts in {1 % every == 0, True}:
                traced = make_fx(lambda c, *x, a=acts: self.step(a, c, *x), tracing_mode="fake")(
                    count, *self.state, *self.data
                )
                functions[acts] = torch.compile(traced, fullgraph=True)

        def take() -> None:
            self.count += 1
            count.add_(1)
            acts = self.count % every == 0
            if not compiled:
                found = self.step(acts, count, *self.state, *self.data)
            else:
                with torch.no_grad():
                    found = functions[acts](count, *self.state, *self.data)
            torch.stack(found).tolist()

        for _ in range(every):
            take()
        return take


def sbx_side(hidden: int) -> Side | None:
    """STEPS gradient steps of SAC; None where sbx is not installed."""
    try:
        import gymnasium
        import jax
        import sbx
        from sbx.common.type_aliases import ReplayBufferSamplesNp
    except ImportError:
        return None

    class Blank(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (OBS,))
        action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,))

    model = sbx.SAC(
        "MlpPolicy", Blank(), policy_kwargs={"net_arch": [hidden] * 2}, buffer_size=10, seed=0
    )
    rng, rows = np.random.default_rng(0), SIZE * STEPS
    data = ReplayBufferSamplesNp(
        rng.standard_normal((rows, OBS), np.float32),
        rng.uniform(-1, 1, (rows, ACTIONS)).astype(np.float32),
        rng.standard_normal((rows, OBS), np.float32),
        (rng.random(rows) < 0.01).astype(np.float32),
        rng.standard_normal(rows, np.float32),
        np.full(rows, 0.99, np.float32),
    )

    def take() -> None:
        p = model.policy
        state = (p.qf_state, p.actor_state, model.ent_coef_state, model.key)
        found = model._train(0.005, -6.0, STEPS, data, 1, 0, *state)
        p.qf_state, p.actor_state, model.ent_coef_state, model.key = found[:4]
        jax.block_until_ready(found[4])

    take()
    return take


def measure(kind: str, hidden: int, rounds: int, bare: bool) -> dict[str, float]:
    """{side: milliseconds of a gradient step}."""
    torch.manual_seed(0)
    sides: dict[str, tuple[Side, int]] = {
        "Etude, eager": (etude_side(kind, hidden, False), 1),
        "Etude, compiled": (etude_side(kind, hidden, True), 1),
    }
    if kind == "sac" and (peer := sbx_side(hidden)):
        sides["sbx"] = (peer, STEPS)
    if bare:
        sides["torch, eager"] = (Bare(kind, hidden).side(False), 1)
        sides["torch, compiled"] = (Bare(kind, hidden).side(True), 1)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (take, steps) in sides.items():
            start = time.process_time()
            for _ in range(STEPS // steps):
                take()
            times[name].append((time.process_time() - start) / STEPS * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["sac", "td3", "rlpd"])
    parser.add_argument("--hidden", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", scratch)
        for hidden in options.hidden:
            for kind in options.kinds:
                found = measure(kind, hidden, options.rounds, not options.no_bare)
                results = json.loads(options.out.read_text()) if options.out.exists() else {}
                results[f"{kind} {hidden} x {hidden}"] = {
                    "milliseconds": {name: round(ms, 3) for name, ms in found.items()},
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "commit": report.commit(),
                    "machine": report.machine(),
                }
                options.out.write_text(json.dumps(results, indent=1) + "\n")
                print(kind, hidden, results[f"{kind} {hidden} x {hidden}"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
