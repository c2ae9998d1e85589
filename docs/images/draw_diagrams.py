"""The diagrams of the pages on concepts: `python docs/images/draw_diagrams.py` writes their SVGs.

Each is 640 wide with large letters, so that it can be read on a telephone, and stands on a light
ground of its own, so that it can be read on dark pages. A test compares the files with the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

WIDTH = 640
INK, PAPER, LINE = "#1c2430", "#fbfbf8", "#8a94a3"
BLUE, GREEN, SAND, ROSE, GREY = "#dce8fa", "#dcf1e0", "#f7ecd0", "#f8dedd", "#ebedf0"


class Drawing:
    """Boxes, texts and arrows, as SVG."""

    def __init__(self, title: str, about: str, height: int) -> None:
        """`about`: what the picture says, for who cannot see it."""
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'fill="{INK}">',
            f"<title>{escape(title)}</title><desc>{escape(about)}</desc>",
            f'<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect width="{WIDTH}" height="{height}" rx="14" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, w: int, h: int, colour: str, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="7 5"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{colour}" '
            f'stroke="{LINE}"{dash}/>'
        )

    def text(
        self,
        x: int,
        y: int,
        words: str,
        size: int = 19,
        bold: bool = False,
        anchor: str = "start",
        clear: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        # Where an arrow passes behind a heading, the heading stays clear of it.
        halo = f' paint-order="stroke" stroke="{PAPER}" stroke-width="8"' if clear else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}{halo}>'
            f"{escape(words)}</text>"
        )

    def lines(self, x: int, y: int, texts: list[str], size: int = 18, step: int = 26) -> None:
        for number, words in enumerate(texts):
            self.text(x, y + number * step, words, size)

    def arrow(self, *points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="2" '
            'marker-end="url(#tip)"/>'
        )

    def labelled(self, x: int, y: int, w: int, h: int, colour: str, texts: list[str]) -> None:
        """A box with lines in its middle, the first of them bold."""
        self.box(x, y, w, h, colour)
        top = y + h // 2 - 13 * (len(texts) - 1) + 6
        for number, words in enumerate(texts):
            self.text(x + w // 2, top + number * 26, words, 18, number == 0, "middle")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def clock() -> str:
    """The four levels with the numbers of the recipe `reach`."""
    import etude

    recipe = etude.recipes.reach()
    counts = etude.plan(recipe).counts
    levels, learn = recipe.clock, recipe.algorithm
    envs, steps = recipe.collector.num_envs, learn.rollout_steps
    minibatches = envs * steps // learn.minibatch_size
    batches = minibatches * learn.update_epochs
    drawing = Drawing(
        "The clock",
        "A run has epochs, an epoch has cycles, a cycle has iterations; an iteration collects and "
        "then takes gradient steps.",
        606,
    )
    drawing.box(16, 16, 608, 440, GREY)
    drawing.text(34, 46, "run", bold=True)
    drawing.text(606, 46, f"{counts['epochs']} epochs", anchor="end")
    drawing.box(34, 62, 572, 376, SAND)
    drawing.text(52, 92, "epoch", bold=True)
    drawing.text(588, 92, f"{levels.cycles} cycles, then a summary", anchor="end")
    drawing.box(52, 108, 536, 312, GREEN)
    drawing.text(70, 138, "cycle", bold=True)
    drawing.text(570, 138, f"{levels.iterations} iterations, then a log row", anchor="end")
    drawing.box(70, 154, 500, 248, BLUE)
    drawing.text(88, 184, "iteration", bold=True)
    drawing.labelled(
        88,
        200,
        464,
        78,
        PAPER,
        ["collect", f"{envs} environments × {steps} steps = {envs * steps:,}"],
    )
    drawing.arrow((320, 278), (320, 304))
    drawing.labelled(
        88,
        306,
        464,
        82,
        PAPER,
        [
            "update",
            f"{learn.update_epochs} update epochs × {minibatches} minibatches = {batches} batches",
        ],
    )
    total = counts["epochs"] * levels.cycles * levels.iterations
    drawing.lines(
        34,
        496,
        [
            f"{counts['epochs']} × {levels.cycles} × {levels.iterations} = {total} iterations",
            f"{total} × {envs * steps:,} = {counts['timesteps']:,} environment steps",
            f"({total} − 1) × {batches} = {counts['updates']:,} gradient steps:",
            "the first iteration only collects, for the normaliser",
        ],
        19,
        30,
    )
    return drawing.svg()


def groups() -> str:
    """Groups of environments, who steps them, shards, and the sum of gradients."""
    drawing = Drawing(
        "Groups and shards",
        "Groups of environments are stepped by any threads or actors; their fragments are put in "
        "group order into shards; gradients are summed in shard order; weights go back.",
        700,
    )
    drawing.text(24, 40, "1  groups: fixed by collector.envs_per_group", bold=True)
    for number in range(4):
        drawing.labelled(24 + number * 150, 56, 142, 66, BLUE, [f"group {number}", "64 envs"])
    drawing.box(24, 180, 592, 74, GREY, dashed=True)
    drawing.text(320, 210, "who steps which group, and who is first,", 18, anchor="middle")
    drawing.text(320, 236, "changes no bit", 18, anchor="middle")
    for number in range(4):
        middle = 95 + number * 150
        drawing.arrow((middle, 122), (middle, 178))
        drawing.arrow((middle, 254), (middle, 322))
    for number in range(4):
        drawing.labelled(24 + number * 150, 324, 142, 46, BLUE, [f"fragment {number}"])
    for number in range(2):
        left = 24 + number * 300
        drawing.arrow((left + 71, 370), (left + 71, 426))
        drawing.arrow((left + 221, 370), (left + 221, 426))
        drawing.labelled(
            left, 428, 292, 74, GREEN, [f"shard {number}", "its segments, its gradient"]
        )
        drawing.arrow((left + 146, 502), (left + 146, 556))
    drawing.labelled(
        24, 558, 592, 74, SAND, ["gradient = shard 0 + shard 1", "always in this order, then Adam"]
    )
    for height, words in (
        (158, "2  any number of threads, actors or machines"),
        (292, "3  fragments, in group order"),
        (406, "4  shards: fixed by learner.shards"),
        (536, "5  one sum"),
    ):
        drawing.text(24, height, words, bold=True, clear=True)
    drawing.text(24, 672, "6  the new weights are broadcast to all groups", bold=True)
    return drawing.svg()


def commit() -> str:
    """The steps of a save, and what is found after a kill between any two of them."""
    drawing = Drawing(
        "How a checkpoint is committed",
        "Files are written and fsynced in a temporary folder, which is then renamed. A kill before "
        "the rename leaves the old checkpoint, one after it the new one.",
        610,
    )
    steps = [
        ("metric rows and replay blocks: fsync", BLUE),
        ("files into a temporary folder: fsync each", BLUE),
        ("manifest with their SHA-256, last: fsync", BLUE),
        ("fsync the temporary folder", BLUE),
        ("rename it to checkpoints/131072", SAND),
        ("fsync checkpoints/", GREEN),
        ("link latest → 131072", GREEN),
    ]
    for number, (words, colour) in enumerate(steps):
        top = 24 + number * 72
        drawing.box(24, top, 440, 48, colour)
        drawing.text(40, top + 31, f"{number + 1}  {words}", 19)
        if number + 1 < len(steps):
            drawing.arrow((244, top + 48), (244, top + 71))
    for top, bottom, first, second in ((24, 288, "the old", "one"), (384, 504, "the new", "one")):
        drawing.parts.append(
            f'<path d="M478 {top}h12v{bottom - top}h-12" fill="none" stroke="{INK}" '
            'stroke-width="2"/>'
        )
        middle = (top + bottom) // 2
        drawing.text(504, middle - 24, "a kill", 18)
        drawing.text(504, middle, "leaves", 18)
        drawing.text(504, middle + 24, f"{first}", 18, bold=True)
        drawing.text(504, middle + 48, f"{second}", 18, bold=True)
    drawing.text(478, 332, "one or the other,", 17)
    drawing.text(478, 356, "never neither", 17)
    drawing.text(24, 566, "A crash of the machine can undo a rename until step 6 is done:", 17)
    drawing.text(24, 590, "then the old checkpoint is found, whole.", 17)
    return drawing.svg()


def exactness() -> str:
    """What leaves the bits as they are, what changes them, and what is not promised."""
    drawing = Drawing(
        "Where exactness ends",
        "Kills, threads, actors, ranks and logs leave the bits; geometry, versions and CPU types "
        "change them; GPUs and environments without snapshots are not promised.",
        664,
    )
    drawing.box(16, 16, 608, 632, ROSE)
    drawing.box(34, 34, 572, 418, SAND)
    drawing.box(52, 52, 536, 218, GREEN)
    drawing.text(72, 84, "the same bits", 21, bold=True)
    drawing.lines(
        72,
        116,
        [
            "SIGKILL at any instant, any number of times",
            "threads, Ray actors, ranks: how many, and which die",
            "machines that join and leave, of the same kind",
            "checkpoint intervals, log writers",
            "resume on another day, in another process",
        ],
        19,
        30,
    )
    drawing.text(72, 306, "another run, and it says so", 21, bold=True)
    drawing.lines(
        72,
        338,
        [
            "envs_per_group, learner.shards, learner.threads",
            "versions of torch, NumPy, MuJoCo, Gymnasium, Etude",
            "another instruction set; learner.reduce fast",
            "seed, rates, sizes: refused at a resume",
        ],
        19,
        30,
    )
    drawing.text(72, 492, "not promised", 21, bold=True)
    drawing.lines(
        72,
        524,
        [
            "a GPU, which nobody has run",
            "environments that cannot be snapshotted",
            "code of yours that changes between kill and resume",
            "callbacks with memory that is not in the checkpoint",
        ],
        19,
        30,
    )
    return drawing.svg()


LAYERS = [
    ("cli", "one file per command"),
    ("share", "bundles, exports, verify"),
    ("compare", "comparisons, the page of a run, sweeps"),
    ("api.py | plugin.py", "plan, train, resume, Run"),
    ("evaluate", "evaluations, films, demonstrations"),
    ("tasks", "reach, pick-place, ... and the recipes"),
    ("rl | building", "PPO, SAC, ... | a run, put together"),
    ("planning", "recipe, resolve, plan"),
    ("training", "loop, evaluation, saving, ranks, logs"),
    ("rollout | mj.py", "groups, threads, Ray"),
    ("envs", "MuJoCo, robots, Gymnasium, PettingZoo"),
    ("data", "segments, datasets, motions"),
    ("models | runs", "policies | everything on disk"),
    ("core", "clock, keys, contracts, registry, trees"),
]


def layers() -> str:
    """Packages from top to bottom: imports go down only."""
    drawing = Drawing(
        "Layers", "Packages from top to bottom; imports go down only.", 28 + 56 * len(LAYERS)
    )
    for number, (name, about) in enumerate(LAYERS):
        top = 20 + number * 56
        drawing.box(24, top, 592, 44, (BLUE, GREEN)[number % 2])
        drawing.text(40, top + 28, name, 18, bold=True)
        drawing.text(600, top + 28, about, 17, anchor="end")
        if number + 1 < len(LAYERS):
            drawing.arrow((320, top + 44), (320, top + 55))
    return drawing.svg()


def drawings() -> Iterator[tuple[Path, str]]:
    """(file, its SVG) of every diagram."""
    for draw in (clock, groups, commit, exactness, layers):
        yield Path(__file__).with_name(f"{draw.__name__}.svg"), draw()


if __name__ == "__main__":
    for path, text in drawings():
        path.write_text(text)
        print(path)
