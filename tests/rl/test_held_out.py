"""What of a dataset is learned from, and what never is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.core.contracts import ActionSpec
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.data.store import files as episodes_files
from etude.data.store import manifest
from etude.data.store.episodes import DamagedStore, EpisodeStore
from etude.data.store.labels import Labels
from etude.data.store.views import EpisodesOf
from etude.rl.offline import split, split_store
from etude.rl.reward_only import RewardOnlyConfig
from etude.runs.documents import SEAL, encode_sealed
from etude.runs.files import Disk
from toys import toy_dataset

KEY = Key(3)


@pytest.fixture
def store(tmp_path: Path) -> EpisodeStore:
    return EpisodeStore.open(toy_dataset(tmp_path / "data"))


def with_clips(path: Path) -> EpisodeStore:
    """Ten episodes, each followed by three clips of it."""
    store = EpisodeStore.open(toy_dataset(path / "plain", 10))
    clipped, labels = EpisodeStore.create(path / "data", store.geometry, Disk()), Labels()
    for number in range(10):
        whole, source = store.episode(number)[0], len(labels)
        for cut in (len(whole.rewards), 4, 3, 2):
            obs = {
                n: np.concatenate([o[:cut], whole.next_obs[n][cut - 1 : cut]])
                for n, o in whole.obs.items()
            }
            clipped.append_episode(obs, whole.actions[:cut], whole.rewards[:cut], False)
            labels.add(f"{number}", "whole" if len(labels) == source else "clip", source)
    return clipped.seal(labels)


def test_clips_are_on_the_side_of_what_they_were_cut_from(tmp_path: Path) -> None:
    store = with_clips(tmp_path)
    sources = np.repeat(np.arange(0, 40, 4), 4)
    np.testing.assert_array_equal(store.labels.groups, sources)
    training, held_out = split_store(store, RewardOnlyConfig(held_out=0.2))
    assert held_out.num_episodes == 8
    assert not set(sources[training.numbers]) & set(sources[held_out.numbers])
    # Without that it would be otherwise: this is what is prevented.
    alone = split(store.returns, 0.2)
    assert set(sources[alone[0]]) & set(sources[alone[1]])


def test_a_lost_or_altered_table_is_an_error_and_never_a_leak(tmp_path: Path) -> None:
    path = with_clips(tmp_path).path
    table = path / "labels.json"
    text = table.read_text()
    document = json.loads(text)
    document["group"] = list(range(40))
    for damage in ("", "{}", text[:-3], json.dumps(document), text.replace("clip", "whole", 1)):
        table.write_text(damage)
        with pytest.raises(DamagedStore, match=r"labels\.json is damaged"):
            EpisodeStore.open(path)
    table.unlink()
    with pytest.raises(DamagedStore, match=r"labels\.json is missing"):
        EpisodeStore.open(path)
    table.write_text(text)
    assert len(EpisodeStore.open(path).labels) == 40
    seal = json.loads((path / "sealed.json").read_text())
    del seal["labels"], seal[SEAL]
    (path / "sealed.json").write_bytes(encode_sealed(seal))
    with pytest.raises(UsageError, match=r"made by an older version.*import or record it again"):
        EpisodeStore.open(path)


def test_no_table_is_too_large_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_clips(tmp_path).path
    monkeypatch.setattr(episodes_files, "_MAX_JSON", 1500)
    assert (path / "labels.json").stat().st_size > 1500
    assert EpisodeStore.open(path).labels.sources[1] == 0


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("group", 5),  # an episode that comes later
        ("group", -1),
        ("group", 0.0),
        ("group", True),
        ("task", 1),
        ("name", None),
        ("success", 1),
        ("rewarded", None),
    ],
)
def test_a_table_from_a_stranger_is_checked(column: str, value: Any, tmp_path: Path) -> None:
    path = toy_dataset(tmp_path / "data", 3)
    document = json.loads((path / "labels.json").read_text())
    for changed in ({column: [value] * 3}, {column: document[column][:2]}, {column: 3}):
        text = json.dumps(document | changed)
        (path / "labels.json").write_text(text)
        seal = json.loads((path / "sealed.json").read_text())
        del seal[SEAL]
        seal["labels"] = hashlib.sha256(text.encode()).hexdigest()
        (path / "sealed.json").write_bytes(encode_sealed(seal))
        with pytest.raises(DamagedStore, match=r"labels\.json"):
            EpisodeStore.open(path)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 7, 10, 40, 101])
@pytest.mark.parametrize("held_out", [0.0, 0.01, 0.1, 0.25, 0.4, 0.5])
def test_the_part_held_out_is_the_part_asked_for(groups: int, held_out: float) -> None:
    returns = np.random.default_rng(0).normal(size=3 * groups)
    kept, held = split(returns, held_out, np.arange(3 * groups) // 3)
    assert sorted([*kept, *held]) == list(range(3 * groups))
    num = len(held) / 3
    assert num == len(set(held // 3))
    assert len(kept) >= 3
    if held_out and groups > 1:
        assert num >= 1
        assert num == min(max(round(held_out * groups), 1), groups - 1)
    else:
        assert num == 0


def test_what_is_held_out_is_spread_over_the_returns() -> None:
    assert split(np.arange(40.0), 0.1)[1].tolist() == [5, 15, 25, 35]
    assert split(np.arange(10.0), 0.4)[1].tolist() == [1, 3, 6, 8]
    assert split(np.arange(5.0), 0.1)[1].tolist() == [2]


def clipped_view(store: EpisodeStore) -> tuple[EpisodesOf, list[Any]]:
    """Two episodes, and two clips of the first; and what they are, read step by step."""
    numbers, cuts = np.array([3, 11, 3, 3]), store.lengths[[3, 11, 3, 3]].copy()
    cuts[2:] = 2, 5
    whole = {n: store.episode(n)[0] for n in (3, 11)}
    return EpisodesOf(store, numbers, None, cuts), [
        (whole[int(n)], int(cut)) for n, cut in zip(numbers, cuts, strict=True)
    ]


def test_a_clip_is_the_beginning_of_its_episode(store: EpisodeStore) -> None:
    view, expected = clipped_view(store)
    assert (view.num_episodes, view.num_clips, view.num_whole) == (4, 2, 2)
    for number, (whole, cut) in enumerate(expected):
        steps, total = view.episode(number)
        np.testing.assert_array_equal(steps.obs["state"], whole.obs["state"][:cut])
        np.testing.assert_array_equal(steps.next_obs["state"], whole.next_obs["state"][:cut])
        assert total == view.returns[number] == sum(whole.rewards[:cut].astype(float).tolist())
        ends = [0] * (cut - 1) + [1]
        assert (steps.terminated | steps.truncated).tolist() == ends
        assert steps.truncated[-1] == (number >= 2)


def test_subsets_of_clips_are_drawn_by_length_from_their_own_steps(store: EpisodeStore) -> None:
    view, expected = clipped_view(store)
    drawn = view.sample_subsets(KEY.generator(), 20_000, 2)
    share = view.lengths / view.lengths.sum()
    for number, (whole, cut) in enumerate(expected):
        mine = drawn.returns == view.returns[number]
        assert abs(mine.mean() - share[number]) < 0.02
        assert (drawn.lengths[mine] == cut).all()
        seen = {row.tobytes() for row in drawn.steps.obs["state"][mine].reshape(-1, 2)}
        assert seen == {row.tobytes() for row in whole.obs["state"][:cut]}


def test_clips_add_no_transition(store: EpisodeStore) -> None:
    view, plain = clipped_view(store)[0], EpisodesOf(store, np.array([3, 11]))
    assert view.num_transitions == plain.num_transitions
    one, two = (v.sample_transitions(KEY.generator(), 500) for v in (view, plain))
    np.testing.assert_array_equal(one.obs["state"], two.obs["state"])
    np.testing.assert_array_equal(one.truncated, two.truncated)


def test_added_clips_stay_with_their_source_and_are_part_of_the_state(tmp_path: Path) -> None:
    path = toy_dataset(tmp_path / "data")
    config = RewardOnlyConfig(add_truncated=100)
    sides = split_store(EpisodeStore.open(path), config)
    again = split_store(EpisodeStore.open(path), config)
    assert sum(side.num_clips for side in sides) == 100
    assert not set(sides[0].numbers) & set(sides[1].numbers)
    assert [side.state_dict() for side in sides] == [side.state_dict() for side in again]
    plain = split_store(EpisodeStore.open(path), RewardOnlyConfig())[0]
    assert plain.num_clips == 0  # its returns differ
    with pytest.raises(EtudeError, match="held out other episodes"):
        plain.load_state_dict(sides[0].state_dict())


def test_episodes_without_rewards_teach_policies_alone(tmp_path: Path) -> None:
    plain = EpisodeStore.open(toy_dataset(tmp_path / "plain", 2))
    store, labels = EpisodeStore.create(tmp_path / "data", plain.geometry, Disk()), Labels()
    for number in range(2):
        steps, _ = plain.episode(number)
        obs = {n: np.concatenate([o, steps.next_obs[n][-1:]]) for n, o in steps.obs.items()}
        store.append_episode(obs, steps.actions, steps.rewards * number, True)
        labels.add("x", rewarded=bool(number))
    encode_sealed = store.seal(labels)
    with pytest.raises(UsageError, match="no rewards for 1 of its 2 episodes") as caught:
        split_store(encode_sealed, RewardOnlyConfig(allow_equal_returns=True))
    assert "\n" not in str(caught.value)
    assert split_store(encode_sealed, RewardOnlyConfig(), for_reward=False)[0].num_episodes == 1


def test_transitions_are_drawn_evenly_from_the_chosen_episodes_alone(store: EpisodeStore) -> None:
    chosen = np.array([3, 11, 20])
    some = EpisodesOf(store, chosen)
    drawn = some.sample_transitions(KEY.generator(), 30_000)
    steps = [store.episode(n)[0] for n in chosen]
    known = np.concatenate([s.obs["state"] for s in steps])
    after = np.concatenate([s.next_obs["state"] for s in steps])
    assert some.num_transitions == len(known)
    place = {row.tobytes(): i for i, row in enumerate(known)}
    found = np.array([place[row.tobytes()] for row in drawn.obs["state"]])
    np.testing.assert_array_equal(drawn.next_obs["state"], after[found])
    counts = np.bincount(found, minlength=len(known))
    expected = 30_000 / len(known)
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_actions_come_in_the_units_of_a_policy(store: EpisodeStore) -> None:
    action = ActionSpec("box", (-0.2, -0.5), (0.2, 0.5))
    raw, some = EpisodesOf(store, np.arange(40)), EpisodesOf(store, np.arange(40), action)
    for draw in ("sample_transitions", "episode"):
        arguments = (KEY.generator(), 64) if draw == "sample_transitions" else (5,)
        again = (KEY.generator(), 64) if draw == "sample_transitions" else (5,)
        one, two = getattr(raw, draw)(*arguments), getattr(some, draw)(*again)
        theirs, ours = (x[0] if draw == "episode" else x for x in (one, two))
        expected = np.clip(theirs.actions / np.array([0.2, 0.5], np.float32), -1, 1)
        np.testing.assert_allclose(ours.actions, expected, rtol=1e-6)
        back = action.to_env(ours.actions)
        np.testing.assert_allclose(
            back, np.clip(theirs.actions, [-0.2, -0.5], [0.2, 0.5]), atol=1e-6
        )


@pytest.mark.parametrize("cut", [0, 2])
def test_returns_of_a_dataset_end_with_its_episodes(store: EpisodeStore, cut: int) -> None:
    """Also with those of a dataset of several shards, whose episodes may end before the stored."""
    action = ActionSpec("box", (-0.2, -0.5), (0.2, 0.5))
    table = np.zeros(6, manifest.ENTRY)
    table["episode"], table["length"] = np.arange(6), store.lengths[:6] - cut
    data = store
    if cut:
        data = manifest.Dataset(store.path, [store], table, store.labels, "seal")  # type: ignore[assignment]
    some = EpisodesOf(data, np.array([1, 4, 5]), action)
    found = some.sample_multi_step(KEY.generator(), 500, 4)
    drawn = some.sample_transitions(KEY.generator(), 500)
    for name in ("obs", "actions"):
        one, two = getattr(found.steps, name), getattr(drawn, name)
        np.testing.assert_equal(one, two)
    episodes = [store.episode(number)[0] for number in (1, 4, 5)]
    place = {
        row.tobytes(): (steps, i, len(steps.rewards) - cut)
        for steps in episodes
        for i, row in enumerate(steps.obs["state"])
    }
    seen = set()
    for n, row in enumerate(found.steps.obs["state"]):
        steps, first, length = place[row.tobytes()]
        stop = min(first + 4, length)
        seen.add(stop - first)
        assert found.counts[n] == stop - first
        assert found.rewards[n].tolist() == [
            *steps.rewards[first:stop],
            *[0.0] * (first + 4 - stop),
        ]
        assert found.steps.terminated[n] == steps.terminated[stop - 1]
        ends = steps.truncated[stop - 1] or (cut > 0 and stop == length)
        assert found.steps.truncated[n] == ends
        after = steps.next_obs["state"][stop - 1]
        np.testing.assert_array_equal(found.steps.next_obs["state"][n], after)
    assert seen == {1, 2, 3, 4}


def test_a_state_names_the_data_and_the_choice(store: EpisodeStore) -> None:
    some = EpisodesOf(store, np.array([1, 2]))
    EpisodesOf(store, np.array([1, 2])).load_state_dict(some.state_dict())
    with pytest.raises(EtudeError, match="held out other episodes"):
        EpisodesOf(store, np.array([1, 3])).load_state_dict(some.state_dict())
    with pytest.raises(EtudeError, match="cannot be appended to"):
        some.append([])
