"""What a run's own metrics say about it: the phase it is in, and what looks wrong.

Works on log rows alone and keeps nothing that the rows do not hold, so a resumed run, given the
rows that were kept, says the same as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Row = Mapping[str, float]

PHASES = ("initialisation", "discovery", "skill development", "optimisation", "convergence")

RECENT = 3
"""Rows in a row that must agree before something is called a warning."""


@dataclass(frozen=True)
class Warning:
    """One thing that looks wrong, and what to try."""

    name: str
    text: str


class Health:
    """Follows the rows of a run; `phase` and `warnings` are about the last one."""

    def __init__(self, total_iterations: int) -> None:
        self._total = max(total_iterations, 1)
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(
            {name: value for name, value in row.items() if name in _READ or _term(name)}
        )

    @property
    def phase(self) -> str:
        """Where learning stands: by success where the task knows it, otherwise by return."""
        success = _series(self._rows, "rollout/success_rate")
        if success:
            return _phase_by_success(success)
        return _phase_by_return(_series(self._rows, "rollout/ep_rew_mean"))

    @property
    def warnings(self) -> list[Warning]:
        if not self._rows:
            return []
        progress = self._rows[-1].get("iterations", 0) / self._total
        return [w for rule in RULES if (w := rule(self._rows, progress)) is not None]


def _phase_by_success(success: Sequence[float]) -> str:
    now = fmean(success[-RECENT:])
    if now < 0.02:
        return PHASES[0]
    if now < 0.2:
        return PHASES[1]
    if now < 0.8:
        return PHASES[2]
    settled = len(success) >= 2 * RECENT and now - fmean(success[-2 * RECENT : -RECENT]) < 0.01
    return PHASES[4] if settled and now >= 0.95 else PHASES[3]


def _phase_by_return(returns: Sequence[float]) -> str:
    """By the share of all improvement that is recent: large while a skill forms, then small."""
    if len(returns) < 2 * RECENT:
        return PHASES[0]
    first, before = fmean(returns[:RECENT]), fmean(returns[-2 * RECENT : -RECENT])
    now, best = fmean(returns[-RECENT:]), max(returns)
    gain = best - first
    if gain <= 0.1 * (abs(first) + 1e-8):
        return PHASES[0]
    recent = (now - before) / gain
    if len(returns) < 4 * RECENT:
        return PHASES[1]
    return PHASES[2] if recent > 0.1 else PHASES[3] if recent > 0.02 else PHASES[4]


def _series(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _recent(rows: Sequence[Row], name: str) -> list[float]:
    """The last few values of a metric, or none before there are enough."""
    values = _series(rows[-RECENT:], name)
    return values if len(values) == RECENT else []


def _fares_well(rows: Sequence[Row]) -> bool:
    """Nearly all episodes succeed, or the return is the highest so far."""
    success, returns = (_recent(rows, f"rollout/{n}") for n in ("success_rate", "ep_rew_mean"))
    before = _series(rows[:-RECENT], "rollout/ep_rew_mean")
    rises = bool(returns and before) and fmean(returns) > max(before)
    return rises or (bool(success) and fmean(success) > 0.8)


def _kl_high(rows: Sequence[Row], progress: float) -> Warning | None:
    values = _recent(rows, "train/approx_kl")
    if not values or min(values) < 0.06 or _fares_well(rows):
        return None
    return Warning(
        "KL too high",
        f"the policy moves by {values[-1]:.3f} in KL per update: lower algorithm.learning_rate or "
        "algorithm.update_epochs, or set algorithm.target_kl",
    )


def _entropy_collapsed(rows: Sequence[Row], progress: float) -> Warning | None:
    spread = _series(rows, "train/std")
    success = _recent(rows, "rollout/success_rate")
    if not spread or spread[-1] > 0.1 * spread[0] or (success and fmean(success) > 0.8):
        return None
    return Warning(
        "entropy collapsed",
        f"the action spread fell from {spread[0]:.2f} to {spread[-1]:.3f} before the task was "
        "learned: raise algorithm.entropy_coef",
    )


def _value_blind(rows: Sequence[Row], progress: float) -> Warning | None:
    values = _recent(rows, "train/explained_variance")
    if progress < 0.2 or not values or max(values) > 0.1:
        return None
    return Warning(
        "value function explains nothing",
        f"explained variance is {values[-1]:.2f}: check the reward's scale, give the critic more "
        "observations, or lower algorithm.gamma",
    )


def _success_stuck(rows: Sequence[Row], progress: float) -> Warning | None:
    success = _series(rows, "rollout/success_rate")
    third = len(success) // 3
    if progress < 0.5 or third < RECENT:
        return None
    now, before = fmean(success[-third:]), fmean(success[-2 * third : -third])
    if now > 0.8 or now - before > 0.02:
        return None
    return Warning(
        "success stuck",
        f"success stays at {now:.0%}: more exploration ({_exploration(rows[-1])}), a denser "
        "reward, or an easier start",
    )


def _needs_noise(rows: Sequence[Row], progress: float) -> Warning | None:
    """Of the last rows with an evaluation, whose actions are not drawn as those of rollouts are.

    Where rollouts also have an easier task, as with a curriculum, or begin elsewhere, as clips of
    motion do, the difference says nothing about noise.
    """
    last = rows[-1] if rows else {}
    if any(name.startswith(("curriculum/", "eval/mpjpe")) for name in last):
        return None
    tested = [row for row in rows if row.get("eval/success_rate") is not None]
    drawn = _recent(tested, "rollout/success_rate")
    certain = _recent(tested, "eval/success_rate")
    if not (drawn and certain) or fmean(certain) > 0.5 * fmean(drawn) or min(drawn) < 0.2:
        return None
    return Warning(
        "success needs the noise",
        f"{fmean(drawn):.0%} of episodes succeed with exploration noise and {fmean(certain):.0%} "
        f"with the most likely actions: train on, or explore less ({_exploration(last)})",
    )


def _exploration(row: Row) -> str:
    """The fields by which the algorithm that logs such rows explores."""
    if "train/ent_coef" in row:
        return "algorithm.target_entropy or algorithm.alpha, algorithm.warmup_steps"
    if "train/critic_loss" in row:
        return "algorithm.exploration, algorithm.warmup_steps"
    return "policy.init_std, algorithm.entropy_coef"


def _term_dominates(rows: Sequence[Row], progress: float) -> Warning | None:
    shares = []
    for row in rows[-RECENT:]:
        terms = {
            name: abs(value) for name, value in row.items() if _term(name) and value is not None
        }
        total = sum(terms.values())
        if len(terms) < 2 or total == 0.0:
            return None
        largest = max(terms, key=lambda name: terms[name])
        shares.append((largest, terms[largest] / total))
    if len(shares) < RECENT or len({name for name, _ in shares}) > 1:
        return None
    name, share = shares[-1]
    if min(value for _, value in shares) < 0.95:
        return None
    return Warning(
        "one reward term dominates",
        f"{name} is {share:.0%} of the reward, the others hardly count: lower its weight",
    )


def _style_saturated(rows: Sequence[Row], progress: float) -> Warning | None:
    agent, demo = _recent(rows, "amp/agent_accuracy"), _recent(rows, "amp/demo_accuracy")
    style = _recent(rows, "amp/style_reward")
    if not (agent and demo and style) or min(*agent, *demo) < 0.97 or max(style) > 0.1:
        return None
    return Warning(
        "discriminator saturated",
        f"it tells {fmean([agent[-1], demo[-1]]):.0%} of all motion from the reference and the "
        f"style reward is {style[-1]:.3f}, so nothing says which motion is nearer: raise "
        "rewards.gradient_penalty, or lower rewards.learning_rate or rewards.updates",
    )


Rule = Callable[[Sequence[Row], float], Warning | None]
RULES: tuple[Rule, ...] = (
    _kl_high,
    _entropy_collapsed,
    _value_blind,
    _success_stuck,
    _needs_noise,
    _term_dominates,
    _style_saturated,
)

_READ = frozenset(
    {
        "iterations",
        "rollout/success_rate",
        "eval/success_rate",
        "rollout/ep_rew_mean",
        "train/approx_kl",
        "train/std",
        "train/explained_variance",
        "amp/agent_accuracy",
        "amp/demo_accuracy",
        "amp/style_reward",
        "train/ent_coef",
        "train/critic_loss",
    }
)


def _term(name: str) -> bool:
    return name.startswith("reward/")
