"""The figures on pages: `FIGURES`, by the names in the marks of the pages.

A figure without a kept result, or whose result lacks its values, is "not measured yet".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from etude.core.catalogue import TUNED
from gates.lib.beginnings import doubt
from gates.lib.full import ALONE, BESIDE_SB3, GATES
from gates.speed.scale_model import check_text, constants_text, tables_text

Results = dict[tuple[str, str], dict[str, Any]]
"""{(gate, variant): result}."""
NOT_YET = "not measured yet"
OLDER = "†"
TIMINGS = ("gym_workers", "ray_speed", "rollout_speed")
"""Gates whose figures are timings."""


def measured_at(result: dict[str, Any]) -> str:
    """The version, if known, and the commit of a result."""
    commit = result["commit"].split()[0][:8]
    return f"{result['version']} ({commit})" if "version" in result else commit


def command(result: dict[str, Any]) -> str:
    """The command that repeats a result, in today's form where an older result names a script."""
    words = result["command"].split()
    if not words[1].endswith(".py"):
        return str(result["command"])
    entry, arguments = GATES[result["gate"]], words[2:]
    if entry.module == "learn.train":
        if "--recipe" in arguments:
            del arguments[(at := arguments.index("--recipe")) : at + 2]
        arguments.insert(0, result["variant"] or entry.calls[0])
    return " ".join(["python", "-m", f"gates.{entry.module}", *arguments])


def values(results: Results, gate: str, variant: str, name: str) -> list[float]:
    """The values of all figures of a result whose names begin with `name`, one for each seed."""
    figures = results[gate, variant]["figures"]
    found = [entry["value"] for key, entry in figures.items() if key.startswith(name)]
    if not found:
        raise KeyError(name)
    return found


def span(found: list[float], form: str = "{:.0f}") -> str:
    """The smallest and the largest value as "3 to 5"; one number if they are equal."""
    low, high = form.format(min(found)), form.format(max(found))
    return low if low == high else f"{low} to {high}"


def percent(found: list[float]) -> str:
    return span([100.0 * value for value in found], "{:.3g}") + " %"


def seeds(found: list[float]) -> str:
    return f"{len(found)} seed{'s' if len(found) > 1 else ''}"


def linked(text: str, results: list[dict[str, Any]], link: str, timed: bool) -> str:
    """Link a figure to `link`, with the commits of its results as the title.

    A mark with the reason follows if today's code may give another figure. timed: whether the
    figure includes a timing. Of several cells the first has the link and the last the mark.
    """
    at = ", ".join(sorted({measured_at(result) for result in results}))
    why = next(filter(None, (why_marked(result, timed) for result in results)), "")
    first, bar, rest = text.partition(" | ")
    older = f'[{OLDER}]({link} "{why}")' if why else ""
    return f'[{first}]({link} "measured at {at}"){bar}{rest}{older}'


def why_marked(result: dict[str, Any], timed: bool) -> str:
    """Why today's code may give another figure; "" where it stands."""
    found = doubt(result)
    why = found.timed if timed else found.learned
    return f"measured at {measured_at(result)}; {why}" if why else ""


class Figure(NamedTuple):
    """A text made from one result of a gate."""

    gate: str
    variant: str
    text: Callable[[Results], str]
    timed: bool = False
    """Whether it includes a timing."""

    def shown(self, results: Results, link: str) -> str:
        """Its text, linked to `link`."""
        try:
            found = self.text(results)
        except KeyError:
            return NOT_YET
        result = results[self.gate, self.variant]
        busy = ", measured beside other work" if result["verdict"].startswith("not judged") else ""
        return linked(found, [result], link, self.timed) + busy


class Table(NamedTuple):
    """A table with one figure in each line; a figure may have several cells."""

    titles: tuple[str, ...]
    lines: dict[str, Figure]

    def shown(self, results: Results, link: str) -> str:
        found = {name: figure.shown(results, link) for name, figure in self.lines.items()}
        if set(found.values()) == {NOT_YET}:
            return f"\n{NOT_YET.capitalize()}.\n"
        rule = "|---" * len(self.titles) + "|"
        lines = [f"| {name} | {text} |" for name, text in found.items()]
        return "\n" + "\n".join([f"| {' | '.join(self.titles)} |", rule, *lines]) + "\n"


class Text(NamedTuple):
    """Lines of plain text made from the details of a result."""

    gate: str
    text: Callable[[dict[str, Any]], str]

    def shown(self, results: Results, link: str) -> str:
        try:
            result = results[self.gate, ""]
            found = self.text(result["details"])
        except KeyError:
            return f"\n{NOT_YET.capitalize()}.\n"
        note = linked("Measured", [result], link, timed=True)
        return f"\n```text\n{found}\n```\n\n{note}\n"


def one(gate: str, variant: str, name: str, form: str) -> Figure:
    """The values of one figure over the seeds, formatted: "{} times"."""
    return Figure(
        gate,
        variant,
        lambda results: form.format(span(values(results, gate, variant, name), "{:.3g}")),
        timed=gate in TIMINGS,
    )


def share(gate: str, variant: str, name: str) -> Figure:
    """A share in %, and the number of seeds if there are several."""

    def text(results: Results) -> str:
        found = values(results, gate, variant, name)
        return percent(found) + (f" ({seeds(found)})" if len(found) > 1 else "")

    return Figure(gate, variant, text)


def points(gate: str, variant: str, name: str) -> Figure:
    """A difference of two shares in percentage points."""

    def text(results: Results) -> str:
        found, *_ = values(results, gate, variant, name)
        return f"{100.0 * found:.3g} percentage points"

    return Figure(gate, variant, text)


def running(recipe: str) -> Figure:
    """The returns of a recipe, and those of stable-baselines3."""

    def text(results: Results) -> str:
        names = (f"return of {side}, seed" for side in ("etude", "sb3"))
        sides = [values(results, "train_gymnasium", recipe, name) for name in names]
        sides_text = [f"{span(found, '{:,.0f}')} ({seeds(found)})" for found in sides]
        return " | ".join([*sides_text, results["train_gymnasium", recipe]["verdict"]])

    return Figure("train_gymnasium", recipe, text)


def returning(recipe: str) -> Figure:
    """The returns of a recipe, and its steps."""

    def text(results: Results) -> str:
        names = ("return of seed", "steps of seed")
        found, steps = (values(results, "train_return", recipe, name) for name in names)
        return f"{returns(found)} ({seeds(found)}) | {span(steps, '{:,.0f}')}"

    return Figure("train_return", recipe, text)


def returns(found: list[float]) -> str:
    return span(found, "{:,.0f}" if max(found) >= 100 else "{:.3g}")


def sac_beside_sb3(env: str) -> Figure:
    """The returns of SAC, and those of stable-baselines3's."""

    def text(results: Results) -> str:
        names = (f"return of {side} sac, seed" for side in ("etude", "sb3"))
        sides = [values(results, "peer_off_policy", env, name) for name in names]
        ours, theirs = (f"{span(side, '{:,.0f}')} ({seeds(side)})" for side in sides)
        shares = values(results, "peer_off_policy", env, "sac, share of that of stable-baselines3")
        verdict = results["peer_off_policy", env]["verdict"]
        said = {"passed": "the gate passes", "FAILED": "the gate **fails**"}.get(verdict, verdict)
        return (
            f"{ours}, where stable-baselines3 has {theirs}: {100 * shares[0]:.0f} % of its mean "
            f"({said})"
        )

    return Figure("peer_off_policy", env, text)


def reach() -> Figure:
    def text(results: Results) -> str:
        seconds = values(results, "train_reach", "reach", "seconds of seed")
        success = percent(values(results, "train_reach", "reach", "success of seed"))
        return f"{span(seconds)} s and {success} success ({seeds(seconds)})"

    return Figure("train_reach", "reach", text, timed=True)


def walk() -> Figure:
    gate, variant = "train_walk", "walk-go1"

    def text(results: Results) -> str:
        upright = values(results, gate, variant, "without a fall of seed")
        off = values(results, gate, variant, "settled_velocity_error of seed")
        seconds = values(results, gate, variant, "seconds of seed")
        return (
            f"{percent(upright)} of 200 fresh episodes without a fall, "
            f"{span(off, '{:.2g}')} m/s off the command, after {span(seconds)} s of training "
            f"({seeds(upright)})"
        )

    return Figure(gate, variant, text, timed=True)


def placing(recipe: str) -> Figure:
    """seeds | success | mm off | steps | first 80 % of an evaluation."""
    gate = "train_pick_place"

    def text(results: Results) -> str:
        success = values(results, gate, recipe, "success of seed")
        kept = results[gate, recipe]["details"].values()
        off = [1000.0 * each["placement_error"] for each in kept]
        first = [each["steps_to_80"] for each in kept]
        if not off:
            raise KeyError("details")
        reached = span([steps for steps in first if steps], "{:,.0f}") if any(first) else "never"
        steps = span(values(results, gate, recipe, "steps of seed"), "{:,.0f}")
        return (
            f"{len(success)} | {percent(success)} | {span(off, '{:.1f}')} | {steps} | {reached}"
            + (" where it was reached" if any(first) and not all(first) else "")
        )

    return Figure(gate, recipe, text)


def learning(recipe: str, variant: str) -> Figure:
    """seeds | steps to 80 % | area: means over seeds with 95 % intervals."""

    def text(results: Results) -> str:
        # Imported here: pages without it are made without numpy.
        import numpy as np

        from gates.lib.compare import half_width

        kept = results["learning", recipe]["details"][recipe][variant]
        steps, area = (np.array(kept[name], float) for name in ("steps_to_80", "area"))
        return (
            f"{len(area)} | {steps.mean():,.0f} ± {half_width(steps):,.0f} "
            f"| {area.mean():.3f} ± {half_width(area):.3f}"
        )

    return Figure("learning", recipe, text)


def lagging(recipe: str) -> Table:
    variants = ("lag 0", "lag 0, prioritised", "lag 1, V-trace", "lag 1, V-trace, prioritised")
    return Table(
        ("variant", "seeds", "steps to 80 %", "area under the success curve"),
        {name: learning(recipe, name) for name in (*variants, "lag 1, GAE")},
    )


def imitating(recipe: str) -> Figure:
    """seeds | clips followed once through | mm from the root | saturated | reversed torques."""

    def text(results: Results) -> str:
        kept = results["train_imitation", recipe]["details"]
        if not kept:
            raise KeyError("details")
        seeds = [list(each.values()) for each in kept.values()]
        cells = [str(len(kept))]
        many = span([sum(clip["once"] for clip in clips) for clips in seeds])
        cells.append(f"{many} of {len(seeds[0])}")
        errors = [sum(clip["mpjpe_l"] for clip in clips) / len(clips) for clips in seeds]
        cells.append(span(errors, "{:.1f}"))
        for name in ("saturated", "reversals"):
            worst = max(clip[name] for clips in seeds for clip in clips)
            cells.append(f"{worst:.1%}")
        return " | ".join(cells)

    return Figure("train_imitation", recipe, text)


def rewarding(variant: str) -> Figure:
    """all held-out steps | inside successes | inside failures: rank correlations, and of time."""

    def text(results: Results) -> str:
        kept = results["train_reward_only", variant]["details"]
        pairs = [("eval/pooled_correlation", "eval/pooled_time_correlation")]
        for which in ("successes", "failures"):
            pairs.append((f"rank_correlation inside {which}", f"time_correlation inside {which}"))
        found = [[kept[name] for name in pair] for pair in pairs]
        if None in (value for pair in found for value in pair):
            raise KeyError("not finite")
        return " | ".join(f"{mine:.2f} ({time:.2f})" for mine, time in found)

    return Figure("train_reward_only", variant, text)


def telling_failures(seed: int) -> Figure:
    """trained reward | a constant | untrained network: pairs in the right order, intervals."""

    def text(results: Results) -> str:
        kept = results["train_reward_only", "libero"]["details"][f"seed {seed}"]
        constant = results["train_reward_only", "libero"]["figures"]["a constant reward"]["value"]
        names = [f"{prefix}/reward_pairs" for prefix in ("eval", "untrained")]
        trained, untrained = (
            f"{kept[name]:.2f} ({kept[f'{name}_low']:.2f} to {kept[f'{name}_high']:.2f})"
            for name in names
        )
        return f"{trained} | {constant} | {untrained}"

    return Figure("train_reward_only", "libero", text)


def taught(part: str, what: str, *names: str, gate: str = "train_demonstrations") -> Figure:
    """`what`, filled with shares in % | minutes | seeds."""

    def text(results: Results) -> str:
        found = [values(results, gate, part, name) for name in names]
        seconds = values(results, gate, part, "seconds of seed")
        minutes = span([each / 60.0 for each in seconds], "{:.1f}")
        return f"{what.format(*map(percent, found))} | {minutes} | {len(seconds)}"

    return Figure(gate, part, text, timed=True)


def in_mujoco(name: str) -> Figure:
    """success in etude eval | in plain MuJoCo | median ms of a step."""
    gate = "sim_to_sim"

    def text(results: Results) -> str:
        rates = [
            percent(values(results, gate, "", f"success of {name} in {where}"))
            for where in ("etude eval", "plain MuJoCo")
        ]
        (median,) = values(results, gate, "", f"median ms of a step of {name}")
        return f"{rates[0]} | {rates[1]} | {median:.2g}"

    return Figure(gate, "", text)


def foreign_text(kept: dict[str, Any]) -> str:
    """A line for each robot of another project, from the details of its gate."""
    lines = [("robot", "package", "actuators", "task", "return", "by zero actions", "success")]
    for name, facts in kept.items():
        limits = " without limits" if facts["torque limits derived"] else ""
        actuators = f"servos{limits}" if facts["servos"] else "its own"
        returns = (f"{facts[key]:.0f}" for key in ("return", "return of zero actions"))
        success = "none" if facts["success"] is None else f"{facts['success']:.0%}"
        lines.append((name, facts["package"], actuators, facts["task"], *returns, success))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


WALKERS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
RETURNS = {"RRD": "rrd", "the episodic reward itself": "given", "IRCR": "ircr"}
LOSSES = {
    "biased, K 8": "state",
    "unbiased, K 8": "state unbiased",
    "biased, K 4": "state 4 steps",
}
FIGURES: dict[str, Figure | Table | Text] = {
    "reach": reach(),
    "walk-go1": walk(),
    "gym-workers": one("gym_workers", "", "workers over one process", "{} times as many steps/s"),
    "batch-engine": Table(
        ("environment", "batch engine over Gymnasium's environments"),
        {task: one("rollout_speed", task, "batch engine over", "{} times") for task in WALKERS},
    ),
    "foreign-robots": Text("foreign_robots", foreign_text),
    "ray-speed": one("ray_speed", "", "Ray over threads", "{} times"),
    "pick-place": Table(
        ("recipe", "seeds", "success", "placed off (mm)", "steps", "first 80 % of an evaluation"),
        {
            f"`{recipe}`": placing(recipe)
            for recipe in (
                "pick-place",
                "pick-place-anywhere",
                "pick-place-original",
                "pick-place-sac",
            )
        },
    ),
    "pick-place-evaluation": share("train_pick_place", "pick-place", "share of evaluation of seed"),
    "learning-reach": lagging("reach"),
    "learning-pick-place": lagging("pick-place"),
    "memory": Table(
        ("policy", "success in 500 fresh episodes"),
        {
            "`lstm`": share("train_memory", "", "success of lstm"),
            "`mlp`": share("train_memory", "", "success of mlp"),
        },
    ),
    "imitation": Table(
        ("recipe", "seeds", "clips followed", "mm from the root", "saturated", "reversed"),
        {f"`imitate-{name}`": imitating(f"imitate-{name}") for name in ("walk", "backflip", "all")},
    ),
    "episodic": Table(
        ("learned from", "mean return"),
        {
            name: one("train_episodic", "", f"return of {key}", "{}")
            for name, key in RETURNS.items()
        },
    ),
    "reward-losses": Table(
        ("loss", "all held-out steps", "inside successes", "inside failures"),
        {name: rewarding(variant) for name, variant in LOSSES.items()},
    ),
    "reward-of-failures": Table(
        ("seed", "trained reward", "a constant", "untrained network"),
        {str(seed): telling_failures(seed) for seed in range(3)},
    ),
    "demonstrations": Table(
        ("recipe", "reached", "minutes", "seeds"),
        {
            "`pick-place-bc`, 200 demonstrations": taught(
                "states", "{} of 200 fresh episodes", "success of seed"
            ),
            "`pick-place-pictures`, 200 demonstrations": taught(
                "pictures",
                "{} of 200 fresh episodes, {} with black pictures",
                *("success of seed", "black pictures"),
            ),
            "`pick-place-rlpd`, 50 demonstrations": taught(
                "rlpd",
                "{}; SAC without them {} after as many steps",
                *("pick-place-rlpd", "pick-place-sac"),
            ),
            "`walk-go1-student`": taught(
                "student",
                "{} of its teacher's return, {} of the tiles that the teacher walks",
                *("share of the return kept", "share of the tiles kept"),
            ),
            "`seek-pictures`, PPO": taught(
                *("seek-pictures", "{} of 200 fresh episodes", "success of seed"),
                gate="train_reach",
            ),
        },
    ),
    "gymnasium": Table(
        (
            "recipe",
            "return after 1,000,000 steps",
            "stable-baselines3, settings of rl_zoo3",
            "reaches it",
        ),
        {f"`{name}`": running(name) for name in BESIDE_SB3},
    ),
    "tuned": Table(
        ("environment", "return in 100 fresh episodes", "steps of a training"),
        {
            f"`{env_id}`": returning(place.partition(":")[2])
            for env_id, place in TUNED.built_in().items()
            if place.partition(":")[2] in ALONE
        },
    ),
    "sac-hopper": sac_beside_sb3("Hopper-v5"),
    "offline": share("train_offline", "", "success on fresh episodes"),
    "offline-margin": points("train_offline", "", "more than imitation"),
    "offline-successes": points(
        "train_offline", "", "success less that of imitation of the successes"
    ),
    "import-memory": one("datasets", "", "GiB of an import", "{} GiB"),
    "draw-growth": share("datasets", "", "growth of a draw"),
    "sim-to-sim": Table(
        ("recipe", "success, `etude eval`", "success, plain MuJoCo", "median ms of a step"),
        {f"`{name}`": in_mujoco(name) for name in ("walk-go1", "pick-place")},
    ),
    "scale-constants": Text("scale", constants_text),
    "scale-check": Text("scale", check_text),
    "scale-tables": Text("scale", tables_text),
}
"""Each is on at least one page."""
