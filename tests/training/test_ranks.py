"""Several learner processes give the bits of one, and outlive nobody whom they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import short_recipes
from etude.api import Run, train
from etude.core.errors import UsageError
from etude.core.ranks import ALONE
from etude.core.trees import Tree, leaves
from etude.data.segments import SegmentBuffer
from etude.planning import recipes
from etude.planning.plan import check_ranks, make_plan
from etude.planning.resolve import resolve
from etude.rollout.local import group_snapshots, group_state
from etude.runs import manifest
from etude.training.distributed import Distributed, SharedCollector, decode, encode
from rank_runs import script, shared_run
from run_hash import run_hash
from sockets import descendants, listening
from toy_envs import ToyEnv
from toys import changed, tiny_motions, tiny_reach, toy_buffer


@pytest.mark.rotated
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_are_taken_in_shard_order(size: int) -> None:
    script("rank_sums.py", str(size))


@pytest.mark.rotated
def test_ranks_and_a_killed_rank_change_nothing(tmp_path: Path) -> None:
    """An LSTM, collection ahead, and a curriculum that goes by evaluations on the first rank."""
    recipe = tiny_motions(1, learner={"shards": 4})
    hits = shared_run(recipe, tmp_path, kills=1, seed=1)
    assert len(hits) == 1
    ranks = Run(tmp_path / "ranks-4")
    assert ranks.folder.manifest()["learner"] == {"ranks": 4, "step": "eager"}
    assert "4 ranks share 4 learner shards: 0 on rank 0" in (ranks.path / "plan.txt").read_text()
    assert not list((ranks.path / "failures").iterdir())
    lone = Run(tmp_path / "ranks-1").folder.manifest()
    assert not any(manifest.differences(lone, ranks.folder.manifest()))


@pytest.mark.slow
def test_an_mlp_without_collection_ahead_too(tmp_path: Path) -> None:
    shared_run(tiny_reach(4, learner={"shards": 4}), tmp_path, kills=0, seed=0)


@pytest.mark.rotated
def test_priorities_and_vtrace_too(tmp_path: Path) -> None:
    recipe = changed(short_recipes.find("reach-at-scale-short"), learner={"shards": 4})
    shared_run(recipe, tmp_path, kills=1, seed=2)


TORCHRUN = ["--nproc-per-node", "2", "--max-restarts", "1", "--local-addr", "127.0.0.1"]


def rank_of(pid: int) -> str | None:
    """The rank that a process was started as."""
    try:
        settings = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return None
    return next((text.removeprefix("RANK=") for text in settings if text.startswith("RANK=")), None)


@pytest.mark.rotated
def test_torchrun_starts_a_killed_rank_again_and_nothing_listens_beyond_loopback(
    tmp_path: Path,
) -> None:
    """The command as a person types it, with torchrun's own meeting point in a file."""
    recipe = tiny_motions(learner={"shards": 2}, evaluation={"final_episodes": 0})
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe))
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(tmp_path / "meet")]
    meet += ["--rdzv-conf", "store_type=file", "--rdzv-id", "one"]
    run = tmp_path / "run"
    command = ["-m", "etude", "train", str(tmp_path / "recipe.yaml"), "--folder", str(run)]
    command += ["--trust"]  # its task is named by a file
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *TORCHRUN, *meet, *command],
        env=os.environ
        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    looks, killed = 0, False
    try:
        while process.poll() is None:
            mine = descendants(process.pid)
            sockets = listening(mine)
            assert sockets["beyond"] == set()
            looks += len(sockets["loopback"]) >= 3  # where they meet, and both ranks
            second = [pid for pid in mine if rank_of(pid) == "1"]
            if not killed and second and list(run.glob("checkpoints/0*")):
                os.kill(second[0], signal.SIGKILL)
                killed = True
            time.sleep(0.02)
    finally:
        process.kill()
        out, _ = process.communicate()
    assert process.returncode == 0, out
    assert killed
    assert looks >= 3, out
    assert out.count("2 ranks share 2 learner shards: 0 on rank 0, 1 on rank 1.") == 2
    assert out.count("Done in ") == 1
    assert run_hash(run) == run_hash(train(recipe, tmp_path / "alone").path)


def test_ranks_that_do_not_divide_the_shards_are_refused() -> None:
    recipe = tiny_reach(2, learner={"shards": 4})
    for size in (1, 2, 4):
        check_ranks(recipe, size)
    with pytest.raises(UsageError, match=r"3 ranks cannot share .* start 1, 2 or 4 of"):
        check_ranks(recipe, 3)
    with pytest.raises(UsageError, match=r"2 ranks cannot share learner\.shards 1 evenly: start 1"):
        make_plan(resolve(tiny_reach(2)), ranks=2)
    with pytest.raises(UsageError, match="sac learns in one process"):
        check_ranks(changed(recipes.find("sac"), learner={"shards": 2}), 2)
    with pytest.raises(UsageError, match=r"use --collector\.kind local"):
        check_ranks(changed(recipe, collector={"kind": "ray"}), 2)


def test_a_fast_sum_is_not_called_exact() -> None:
    assert make_plan(resolve(tiny_reach(2))).exactness["exact"]
    fast = make_plan(resolve(tiny_reach(2, learner={"reduce": "fast", "shards": 2})), ranks=2)
    assert not fast.exactness["exact"]
    assert any("gives other bits" in note for note in fast.notes)


def test_ranks_have_shards_in_a_row() -> None:
    assert [list(Distributed(Mock(rank=r, size=2)).part(4)) for r in range(2)] == [[0, 1], [2, 3]]
    assert list(ALONE.part(3)) == [0, 1, 2]


def test_rows_of_a_rank_are_aligned_as_in_a_whole_buffer() -> None:
    """Kernels may round by alignment."""
    whole = toy_buffer(ToyEnv(1).spec, rows=240, steps=3)
    for rows in (slice(0, 80), slice(80, 160), slice(160, 240)):
        own = SegmentBuffer(whole.spec, range(rows.start, rows.stop))
        assert own.spec.num_envs <= 80 + 63
        for name in ("actions", "rewards", "terminated", "log_probs"):
            mine, all_of = getattr(own.part(rows), name), getattr(whole.part(rows), name)
            assert mine.shape == all_of.shape
            assert mine.ctypes.data % 64 == all_of.ctypes.data % 64


def test_the_state_of_a_shared_collector_asks_no_other_rank() -> None:
    ranks, local = Mock(rank=0, size=2), Mock()
    local.state_dict.return_value = group_state([{"mine": 1}])
    ranks.gather.side_effect = lambda parts: [*parts, {"other": 2}]
    shared = SharedCollector(ranks, local)
    shared.gather()
    ranks.gather.side_effect = AssertionError
    assert shared.state_dict() == group_state([{"mine": 1}, {"other": 2}])
    shared.collect(Mock(), 0)
    with pytest.raises(RuntimeError, match="gather"):  # It would be the state before this.
        shared.state_dict()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_rank_gets_its_own_groups(rank: int) -> None:
    ranks, local = Mock(rank=rank, size=2), Mock()
    ranks.part.side_effect = lambda count: range(rank * count // 2, (rank + 1) * count // 2)
    saved: list[Tree] = [{"group": number} for number in range(4)]
    SharedCollector(ranks, local).load_state_dict(group_state(saved))
    (state,) = local.load_state_dict.call_args.args
    assert group_snapshots(state) == saved[2 * rank : 2 * rank + 2]


def test_messages_arrive_as_they_were_sent() -> None:
    sent = {
        "a/b": [1, 2.5, float("inf"), None, True, "text", {}],
        "array": {"dict": np.arange(3), "empty": np.zeros((0, 2), np.float32)},
        "scalar": np.float64(0.1),
        "nested": [{"tensor": torch.arange(4, dtype=torch.float16)}, np.array(True), []],
    }
    there = decode(encode(sent))
    assert there["a/b"] == sent["a/b"]
    assert there["scalar"] == 0.1
    for name, array in leaves(sent["array"]):
        assert there["array"][name].dtype == array.dtype
        assert np.array_equal(there["array"][name], array)
    assert torch.equal(there["nested"][0]["tensor"], sent["nested"][0]["tensor"])
    assert there["nested"][1].dtype == np.bool_
    assert there["nested"][1].shape == ()
    assert decode(encode((1, (2,)))) == [1, [2]]
