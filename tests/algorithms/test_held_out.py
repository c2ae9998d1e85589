"""What of a dataset is learned from, and what never is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etude.algorithms.held_out import EpisodesOf, split, split_store
from etude.core.contracts import ActionSpec
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.experience.episodes import EpisodeStore
from etude.experience.episodes_about import clip_kind, read_sources
from toys import toy_dataset

KEY = Key(3)


@pytest.fixture
def store(tmp_path: Path) -> EpisodeStore:
    return EpisodeStore.open(toy_dataset(tmp_path / "data"))


def tell(store: EpisodeStore, kinds: list[str]) -> None:
    episodes = [{"name": f"demo_{i}", "kind": kind} for i, kind in enumerate(kinds)]
    (store.path / "about.json").write_text(json.dumps({"episodes": episodes}))


def test_clips_are_on_the_side_of_what_they_were_cut_from(store: EpisodeStore) -> None:
    sources = np.repeat(np.arange(0, 40, 4), 4)  # each whole episode and three clips of it
    tell(store, ["whole" if i == s else clip_kind(f"demo_{s}") for i, s in enumerate(sources)])
    np.testing.assert_array_equal(read_sources(store.path, 40), sources)
    kept, held = split_store(store, 0.2)
    assert len(held) == 8
    assert not set(sources[kept]) & set(sources[held])
    # Without that it would be otherwise: this is what is prevented.
    alone = split(store.returns, 0.2)
    assert set(sources[alone[0]]) & set(sources[alone[1]])


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"episodes": 3}', '{"episodes": [1, 2]}', '{"episodes": [{"kind": 4}]}']
)
def test_a_store_that_does_not_know_is_split_by_episodes(store: EpisodeStore, text: str) -> None:
    (store.path / "about.json").write_text(text)
    np.testing.assert_array_equal(read_sources(store.path, 40), np.arange(40))
    np.testing.assert_array_equal(split_store(store, 0.1)[1], split(store.returns, 0.1)[1])


def test_a_clip_of_nothing_known_is_on_its_own(store: EpisodeStore) -> None:
    tell(store, [clip_kind("gone")] * 40)
    np.testing.assert_array_equal(read_sources(store.path, 40), np.arange(40))


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


def test_a_state_names_the_data_and_the_choice(store: EpisodeStore) -> None:
    some = EpisodesOf(store, np.array([1, 2]))
    EpisodesOf(store, np.array([1, 2])).load_state_dict(some.state_dict())
    with pytest.raises(EtudeError, match="held out other episodes"):
        EpisodesOf(store, np.array([1, 3])).load_state_dict(some.state_dict())
    with pytest.raises(EtudeError, match="cannot be appended to"):
        some.append([])
