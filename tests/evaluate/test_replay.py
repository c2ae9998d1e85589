"""Replays of training episodes: equal to what a run computed, without a trace in its folder."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
import etude
from etude.building.rewind import Watch, iteration_at, rewound
from etude.cli.main import main as cli
from etude.core.contracts import Fragment
from etude.core.errors import UsageError
from etude.core.trees import digest
from etude.data.store.episodes import EpisodeStore
from etude.evaluate.replay import page, replay, table, write
from etude.runs.folder import RunFolder
from etude.training.loop import Callback, Context
from toys import tiny_bc, tiny_reach


class Kept(Callback):
    """All fragments, and hashes of the policy after each iteration."""

    def __init__(self) -> None:
        self.fragments: list[list[Fragment]] = []
        self.policies: list[str] = []

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self.fragments.append(copy.deepcopy(fragments))
        self.policies.append(digest(dict(context.algorithm.policy_parts()[0])))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Kept]:
    """Six iterations of 8 steps of 32 environments; episodes of 12 steps cross iterations."""
    kept = Kept()
    recipe = tiny_reach(env={"max_episode_steps": 12})
    return etude.train(recipe, tmp_path_factory.mktemp("run") / "a", callbacks=[kept]).path, kept


def hashes(folder: Path) -> dict[str, str]:
    """{file: hash} of all that a folder holds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def recorded(kept: Kept, env: int, first: int, length: int, name: str) -> Any:
    group, row = divmod(env, 8)
    whole = np.concatenate([getattr(each[group], name)[row] for each in kept.fragments])
    return whole[first : first + length]


@pytest.mark.parametrize(("iteration", "column", "env"), [(0, 0, 3), (1, 3, 17), (4, 7, 31)])
def test_an_episode_has_the_bits_of_its_training(
    trained: tuple[Path, Kept], iteration: int, column: int, env: int
) -> None:
    path, kept = trained
    before = hashes(path)
    with RunFolder.open(path):  # another process trains it
        found = replay(path, iteration * 256 + column * 32, env, film=False)
    first = int(found.columns["step"][0]) // 32
    assert first <= iteration * 8 + column < first + found.length
    for name, array in (("actions", found.actions), ("rewards", found.rewards)):
        assert array.tobytes() == recorded(kept, env, first, found.length, name).tobytes()
    observed = [fragment[env // 8].obs["state"][env % 8] for fragment in kept.fragments]
    there = np.concatenate(observed)[first : first + found.length]
    assert found.obs["state"][:-1].tobytes() == there.tobytes()
    ends = recorded(kept, env, 0, 48, "terminated") | recorded(kept, env, 0, 48, "truncated")
    assert bool(found.ending) == bool(ends[first + found.length - 1])
    assert not ends[first : first + found.length - 1].any()
    assert not first or ends[first - 1]
    assert found.is_same
    assert not found.notes
    assert hashes(path) == before


def test_the_table_adds_up(trained: tuple[Path, Kept]) -> None:
    found = replay(trained[0], 600, 5, film=False)
    terms = [values for name, values in found.columns.items() if name.startswith("reward/")]
    assert np.allclose(np.sum(terms, axis=0), found.rewards, atol=1e-6)
    assert sum(found.rewards) == pytest.approx(found.statistics["return"], abs=1e-5)
    header, *rows = table(found).splitlines()
    assert len(rows) == found.length
    assert "ratio" in header
    assert "advantage" in header
    assert rows[-1].endswith(found.ending)
    assert rows[0].endswith(",")
    # The first iteration only collects; a step of it has no advantage that was learned from.
    assert np.isfinite(found.columns["value"]).all()


def test_the_next_episode_follows(trained: tuple[Path, Kept]) -> None:
    one, two = (replay(trained[0], 600, 5, number, film=False) for number in (0, 1))
    assert one.columns["step"][-1] + 32 == two.columns["step"][0]


def test_an_iteration_ends_with_the_policy_of_the_run(trained: tuple[Path, Kept]) -> None:
    path, kept = trained
    with rewound(path, 3) as moment:
        moment.forward()
        moment.forward(1)
        policy = digest(dict(moment.loop.algorithm.policy_parts()[0]))
        assert policy == kept.policies[3]
        assert moment.rows_compared == 1  # of iterations 2 and 3, from the checkpoint before
        assert moment.is_same


def test_what_differs_from_the_log_is_said(trained: tuple[Path, Kept], tmp_path: Path) -> None:
    """A run whose log was computed otherwise, here by a changed number in it."""
    path = tmp_path / "copy"
    shutil.copytree(trained[0], path, symlinks=True)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    lines[0] = json.dumps(row | {"train/value_loss": row["train/value_loss"] + 1.0})
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for checkpoint in (path / "checkpoints").iterdir():  # so that it begins at the start
        if not checkpoint.is_symlink():
            shutil.rmtree(checkpoint)
    found = replay(path, 300, 0, film=False)
    assert not found.is_same
    assert "The log row of step 512 differs" in found.notes[0]
    assert "train/value_loss" in found.notes[0]


def test_settings_that_a_resume_changed_are_those_of_their_time(tmp_path: Path) -> None:
    recipe = tiny_reach(6).replace(checkpoint__every="1 iteration", checkpoint__keep_last=9)
    kept = Kept()
    path = etude.train(recipe, tmp_path / "run", callbacks=[kept]).path
    # Back to the end of iteration 2, from where another rate is used.
    again = Kept()
    etude.resume(path, checkpoint=512, callbacks=[again], changes={"algorithm.learning_rate": 1e-2})
    assert kept.policies[3] != again.policies[1]
    for at, wanted in ((1, kept.policies[1]), (3, again.policies[1])):
        with rewound(path, at) as moment:
            moment.forward()
            moment.forward(1)
            assert digest(dict(moment.loop.algorithm.policy_parts()[0])) == wanted
    # From before the change, across it.
    for name in ("000000000512", "000000000768", "000000001024", "000000001280"):
        shutil.rmtree(path / "checkpoints" / name)
    with rewound(path, 4) as moment:
        assert moment.start.step == 256
        moment.forward()
        moment.forward(1)
        assert digest(dict(moment.loop.algorithm.policy_parts()[0])) == again.policies[2]


def test_a_larger_budget_counts_from_where_it_was_given(tmp_path: Path) -> None:
    recipe = tiny_reach(4).replace(
        algorithm__final_learning_rate=0.1, checkpoint__every="1 iteration", checkpoint__keep_last=9
    )
    kept = [Kept(), Kept()]
    path = etude.train(recipe, tmp_path / "run", callbacks=kept[:1]).path
    etude.resume(path, total_timesteps=6 * 256, callbacks=kept[1:])
    policies = kept[0].policies + kept[1].policies
    for at in (1, 2, 5):
        with rewound(path, at) as moment:
            moment.forward()
            moment.forward(1)
            assert digest(dict(moment.loop.algorithm.policy_parts()[0])) == policies[at]


class _Steps(Watch):
    def __init__(self) -> None:
        self.count = 0

    def stepped(self, algorithm: Any, metrics: Any) -> None:
        self.count += 1


def test_steps_and_environments_that_do_not_exist_are_refused(
    trained: tuple[Path, Kept], tmp_path: Path
) -> None:
    path, _ = trained
    with pytest.raises(UsageError, match="has the steps 0 to 1,535, not 1,536"):
        replay(path, 1536)
    with pytest.raises(UsageError, match="environments 0 to 31, not 32"):
        replay(path, 0, 32)
    loops = tiny_reach().algorithm.loops(
        tiny_reach(), tiny_reach().algorithm.geometry(tiny_reach())
    )
    assert [iteration_at(step, loops) for step in (0, 255, 256)] == [0, 0, 1]


def test_the_command_writes_what_it_says(
    trained: tuple[Path, Kept], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(trained[0]), "--at", "600", "--env", "5", "-o", str(tmp_path / "out")]
    assert cli([*words, "--formats", "table,dataset", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["same_bits"]
    assert document["steps"] == 12
    with closing(EpisodeStore.open(tmp_path / "out" / "dataset")) as data:
        assert data.num_episodes == 1
        assert data.lengths.tolist() == [12]
    assert cli(["replay", str(trained[0])]) != 0
    assert "--at STEP" in capsys.readouterr().err


@pytest.mark.rotated
def test_the_page_is_scrubbed_without_a_network(trained: tuple[Path, Kept], tmp_path: Path) -> None:
    if chromium.find() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    found = replay(trained[0], 600, 5)
    text = page(found)
    assert len(text) < 5e6 * max(found.footage.seconds / 60, 1)  # type: ignore[union-attr]
    (tmp_path / "page.html").write_text(text)
    with chromium.Browser(tmp_path / "profile") as browser:
        browser._call("Network.enable")
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser._call("Network.emulateNetworkConditions", offline=True, **offline)
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("document.querySelector('#pictures img')?.naturalWidth === 480")
        shown = "document.querySelector('#pictures img').src"
        first = browser.run(shown)
        browser.run(
            "(() => { const t = document.getElementById('time'); t.value = 9; "
            "t.dispatchEvent(new Event('input')); })()"
        )
        assert browser.run("document.getElementById('step').textContent") == "step 9 of 11"
        assert browser.run(shown) != first
        curves = "[...document.querySelectorAll('.curve h3')].map(each => each.textContent)"
        assert {"actions", "reward terms", "value", "advantage", "ratio"} <= {*browser.run(curves)}
        browser.press("ArrowLeft")
        assert browser.run("document.getElementById('step').textContent") == "step 8 of 11"


def test_a_run_that_learns_from_a_dataset_is_computed_again(tmp_path: Path) -> None:
    run = etude.train(tiny_bc(tmp_path, "mlp", 2, 2, "1 epoch"), tmp_path / "run")
    watch = _Steps()
    with rewound(run.path, 1, watch) as moment:
        moment.forward()
        moment.forward(1)
        assert watch.count
    with pytest.raises(UsageError, match="learns from a dataset"):
        replay(run.path, 0)


def test_files_are_written_for_each_format(trained: tuple[Path, Kept], tmp_path: Path) -> None:
    found = replay(trained[0], 0, 0, film=False)
    made = write(found, tmp_path, ["page", "table"])
    assert [path.name for path in made] == ["page.html", "table.csv"]
