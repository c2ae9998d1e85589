"""The gallery: `python docs/_site/gallery.py` writes docs/about/gallery.md from the table below.

A card is one entry. Its film is docs/images/RECIPE.webp, which `docs/images/draw_films.py` makes of
a trained run; an entry may name the film of a recipe with the same task instead. What it reached,
and in how long, is read from the result of the gate that trains it. A test fails where page and
table differ, where a recipe with an environment is on no card, and where a film is missing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from etude.core.catalogue import RECIPES

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent))
from gates.lib.full import ALONE, BESIDE_SB3  # noqa: E402
from gates.pages.faults_table import load  # noqa: E402
from gates.pages.page_figures import (  # noqa: E402
    NOT_YET,
    OLDER,
    Figure,
    Results,
    command,
    measured_at,
    percent,
    returns,
    seeds,
    span,
    values,
)

PAGE = DOCS / "about/gallery.md"
MEASURED = "../measured.md"
_LINK = re.compile(r'\[([^\]]*)\]\([^)"]*(?:"[^"]*")?\)|, measured beside other work')
FRESH = "{} of %d fresh episodes"


class Trained(NamedTuple):
    """What the gate that trains a recipe tells of it."""

    gate: str
    variant: str
    name: str
    """The figure that says how well it went: what its name begins with, for each seed."""
    words: str
    """A sentence around that figure."""
    form: Callable[[list[float]], str] = percent
    seconds: str = "seconds of seed"

    def reached(self, results: Results) -> str:
        figures = results[self.gate, self.variant]["figures"]
        found = values(results, self.gate, self.variant, self.name)
        over = "" if self.name in figures else f" ({seeds(found)})"  # Else it is of all seeds.
        return self.words.format(self.form(found)) + over

    def time(self, results: Results) -> str:
        return f"{span(values(results, self.gate, self.variant, self.seconds), '{:,.0f}')} s"


def running(recipe: str) -> Trained:
    words = "a return of {} after 1,000,000 steps"
    return Trained("train_gymnasium", recipe, "return of etude", words, returns)


def returning(recipe: str) -> Trained:
    words = "a return of {} in 100 fresh episodes"
    return Trained("train_return", recipe, "return of seed", words, returns)


def walking(recipe: str) -> Trained:
    words = "{} of 200 fresh episodes of 10 s without a fall"
    return Trained("train_walk", recipe, "without a fall of seed", words)


def placing(recipe: str, episodes: int = 100) -> Trained:
    return Trained("train_pick_place", recipe, "success of seed", FRESH % episodes)


class Entry(NamedTuple):
    """A task."""

    recipe: str
    page: str
    trained: Trained | None = None
    demo: bool = False
    options: str = ""
    note: str = ""
    film: str = ""
    """The recipe whose film is shown, where it is not that of this one."""
    variants: tuple[str, ...] = ()
    """Recipes of the same task that have no card of their own."""


EARLIER_BODY = "The film is of an earlier humanoid, whose torques were not limited."
REACH = Trained("train_reach", "reach", "success of seed", FRESH % 200)
SEEK = Trained("train_reach", "seek-pictures", "success of seed", FRESH % 200)
CLONED = Trained("train_demonstrations", "states", "success of seed", FRESH % 200)
MEMORY = Trained("train_memory", "", "success of lstm", FRESH % 500, seconds="seconds of lstm")
EPISODIC = Trained(
    *("train_episodic", "", "return of rrd", "a mean return of {}", returns),
    seconds="seconds of the slowest",
)
IMITATED = "{} of its episodes walked to their end"
IMITATE_WALK = Trained(
    *("train_imitation", "imitate-walk", "episodes walked", f"{IMITATED}, within 25 mm")
)
BACKFLIP = Trained(
    "train_imitation",
    "imitate-backflip",
    "flips",
    "a whole backflip, landing included, in {} of its episodes",
)
CLIPS = Trained("train_imitation", "imitate-all", "clips", "{} clips followed to their end", span)
BETTER = "a return higher than that of random agents by at least {} (95 % intervals)"
SPREAD = Trained("train_spread", "", "margin of seed", BETTER, returns)
AMP_WALK = Trained("train_imitation", "amp-walk", "episodes walked", IMITATED)
SHORT = {
    "halfcheetah": "The film is of a shorter run, of 160,000 steps with a larger learning rate."
}
TASKS = [
    Entry("walk-go1", "robots.md", walking("walk-go1"), demo=True),
    Entry("walk-go1-robust", "robots.md", walking("walk-go1-robust"), film="walk-go1"),
    Entry(
        *("walk-go1-rough", "robots.md", walking("walk-go1-rough")),
        note="The film is of a shorter run, of 2 million steps.",
        variants=("walk-go1-student",),
    ),
    Entry(
        *("pick-place", "pick-place.md", placing("pick-place")),
        demo=True,
        variants=("pick-place-original", "pick-place-sac", "pick-place-rlpd"),
    ),
    Entry("pick-place-anywhere", "pick-place.md", placing("pick-place-anywhere", 500)),
    Entry(
        *("pick-place-bc", "demonstrations.md", CLONED),
        options="--algorithm.dataset data/pick",
        film="pick-place",
        variants=("pick-place-pictures",),
    ),
    Entry(
        *("reach", "first-run.md", REACH),
        demo=True,
        variants=("reach-short", "reach-at-scale"),
    ),
    Entry("reach-memory", "segments.md", MEMORY),
    Entry("episodic", "rewards.md", EPISODIC, film="reach", variants=("episodic-ircr",)),
    Entry("imitate-walk", "imitation.md", IMITATE_WALK, note=EARLIER_BODY),
    Entry("imitate-backflip", "imitation.md", BACKFLIP, note=EARLIER_BODY),
    Entry("imitate-all", "imitation.md", CLIPS, film="imitate-backflip", variants=("amp-clips",)),
    Entry("amp-walk", "rewards.md", AMP_WALK, note=EARLIER_BODY),
    Entry("track-g1", "tracking.md"),
    *(Entry(name, "robots.md", running(name), note=SHORT.get(name, "")) for name in BESIDE_SB3),
    *(Entry(name, "your-own.md", returning(name)) for name in ALONE),
    Entry("spread", "segments.md", SPREAD),
    Entry("seek-pictures", "demonstrations.md", SEEK),
]
INTRODUCTION = f"""\
# Gallery

<!-- Made by `python docs/_site/gallery.py`: do not edit. -->

These are the tasks that come with Etude, with the command that trains each. `etude eval RUN
--video` films your own run ([with the extra `video`](../installing.md)). Times are from the command
to its end, on two shared cores; {OLDER} marks figures that are not proven to hold for today's code.
"""


def film(entry: Entry) -> Path:
    """The film of a card."""
    return DOCS / "images" / f"{entry.film or entry.recipe}.webp"


def measured(trained: Trained | None, results: Results) -> dict[str, str]:
    """What a recipe reached, in how long, and by which command that was measured."""
    key = (trained.gate, trained.variant) if trained else ("", "")
    if trained is None or key not in results:
        return {"reaches": NOT_YET}
    told = {
        name: Figure(*key, text, timed=name == "takes").shown(results, MEASURED)
        for name, text in (("reaches", trained.reached), ("takes", trained.time))
    }
    result = results[key]
    verdict = f": [a bound is missed]({MEASURED})" if result["verdict"] == "FAILED" else ""
    if result["verdict"].startswith("not shown"):
        verdict = f", beside a peer [{result['verdict']}]({MEASURED})"
    told["measured by"] = f"`{command(result)}` on {result['date'][:10]}{verdict}"
    told["commit"] = f"`{measured_at(result)}`"
    return {name: text for name, text in told.items() if text != NOT_YET}


def lines(entry: Entry, results: Results) -> Iterator[tuple[str, str]]:
    """The small print of a card."""
    yield from measured(entry.trained, results).items()
    module, _, function = RECIPES.built_in()[entry.recipe].partition(":")
    file = f"src/{module.replace('.', '/')}.py"
    yield "its recipe", f"`{function}` in [`{file}`](../../{file})"
    title = (DOCS / entry.page).read_text().partition("\n")[0].removeprefix("# ")
    yield "explained in", f"[{title}](../{entry.page})"
    for name in entry.variants:
        yield f"`{name}`", RECIPES.purpose(name)


def card(entry: Entry, results: Results) -> str:
    """A task: its film, its purpose, what it reached, its commands, and the small print."""
    purpose = RECIPES.purpose(entry.recipe)
    borrowed = f"The film is of `{entry.film}`." if entry.film else ""
    shown = f"![{purpose}](../images/{film(entry).name})\n\n" if film(entry).is_file() else ""
    about = purpose.partition(": `--")[0].rstrip(".") + "."
    notes = " ".join(filter(None, [about, borrowed, entry.note]))
    found = measured(entry.trained, results)
    figures = ", ".join(found[name] for name in ("reaches", "takes") if name in found)
    figures = _LINK.sub(r"\1", figures)  # those are in the small print
    train = f"etude train {entry.recipe} {entry.options}".rstrip()
    commands = [f"`{train}`", *([f"`etude demo {entry.recipe}`"] if entry.demo else [])]
    table = "\n".join(f"| {name} | {text} |" for name, text in lines(entry, results))
    return f"""\
<div class="card" markdown>

## {entry.recipe}

{shown}{notes}

{figures}

{"<br>".join(commands)}

<details markdown><summary>How it was measured</summary>

| | |
|---|---|
{table}

</details>
</div>
"""


def page() -> str:
    """The whole page."""
    results = load()
    filmed_first = sorted(TASKS, key=lambda entry: not film(entry).is_file())
    cards = "\n".join(card(entry, results) for entry in filmed_first)
    return f'{INTRODUCTION}\n<div class="cards" markdown>\n{cards}</div>\n'


if __name__ == "__main__":
    PAGE.write_text(page())
