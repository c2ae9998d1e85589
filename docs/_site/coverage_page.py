"""The page of test coverage: `make coverage` measures, and this writes docs/about/coverage.md.

python docs/_site/coverage_page.py build/coverage.json "what was run"
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "about" / "coverage.md"
LOWEST = 10
"""Files in the second table: those with the most statements that no test runs."""
TEXT = """# Test coverage

Statements of `src/etude` that tests run, in processes that they start too, counted by
[coverage](https://coverage.readthedocs.io) at commit {commit}: **{total:.1%}** of {statements:,}.
What was run: {run}. `make coverage` measures again and writes this page; there is no bound, since a
statement that was run is not one whose result was checked.

| package | statements | run by tests |
|---|---|---|
{packages}

The files with the most statements that no test runs:

| file | statements not run | run by tests |
|---|---|---|
{files}
"""


def page(report: dict[str, Any], run: str, commit: str) -> str:
    """The page of a report by `coverage json`."""
    statements, missing = Counter[str](), Counter[str]()
    files = list[tuple[int, str, float]]()
    for name, file in report["files"].items():
        path = name.partition("src/etude/")[2] or name
        package = path.partition("/")[0]
        summary = file["summary"]
        statements[package] += summary["num_statements"]
        missing[package] += summary["missing_lines"]
        share = 1.0 - summary["missing_lines"] / max(1, summary["num_statements"])
        files.append((summary["missing_lines"], path, share))
    rows = [
        f"| `{name}` | {count:,} | {1.0 - missing[name] / max(1, count):.1%} |"
        for name, count in sorted(statements.items())
        if count
    ]
    worst = [
        f"| `{name}` | {lines:,} | {share:.1%} |"
        for lines, name, share in sorted(files, reverse=True)[:LOWEST]
    ]
    total = statements.total()
    return TEXT.format(
        commit=commit,
        total=1.0 - missing.total() / max(1, total),
        statements=total,
        run=run,
        packages="\n".join(rows),
        files="\n".join(worst),
    )


def main() -> None:
    report, run = Path(sys.argv[1]), sys.argv[2]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    PAGE.write_text(page(json.loads(report.read_text()), run, commit))
    print(PAGE)


if __name__ == "__main__":
    main()
