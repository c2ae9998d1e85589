from __future__ import annotations

import numpy as np
import pytest
from recorded import fitted, humanoid, needs_clips
from recorded import still as rest

from etude.core.contracts import Array
from etude.data.motion import library, motions
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion

RATE = 30.0


def still(frames: int) -> Array:
    """Poses [frames, 43] of the figure at rest, 1 m above the floor."""
    return np.tile(rest(), (frames, 1))


def test_a_constant_spin_and_a_constant_speed_are_found_exactly() -> None:
    poses, times = still(20), np.arange(20) / RATE
    poses[:, :3] += times[:, None] * np.array([1.0, -2.0, 0.5])
    spin, start = np.array([0.4, -1.1, 2.0]), rot.exp(np.array([0.3, 0.8, -0.2]))
    poses[:, 3:7] = rot.multiply(rot.exp(times[:, None] * spin), start)
    own = np.array([-3.0, 0.2, 1.0])
    poses[:, 25:29] = rot.exp(times[:, None] * own)  # the right hip
    poses[:, 29] = 4.0 * times  # and knee
    found = library.measured(poses, RATE, humanoid())
    np.testing.assert_allclose(found.speed[:, :3], [[1.0, -2.0, 0.5]] * 20, atol=1e-9)
    local = rot.rotate(rot.conjugate(poses[:, 3:7]), np.broadcast_to(spin, (20, 3)))
    np.testing.assert_allclose(found.speed[:, 3:6], local, atol=1e-9)
    np.testing.assert_allclose(found.speed[:, 20:23], np.broadcast_to(own, (20, 3)), atol=1e-9)
    np.testing.assert_allclose(found.speed[:, 23], 4.0, atol=1e-9)
    np.testing.assert_allclose(found.spin[:, 0], np.broadcast_to(spin, (20, 3)), atol=1e-9)
    np.testing.assert_allclose(found.velocity[:, 0], [[1.0, -2.0, 0.5]] * 20, atol=1e-9)
    # A body at the end of a lever: v = w x r, up to the square of the step.
    lever = found.position[:, 2] - found.position[:, 0]
    expected = np.array([1.0, -2.0, 0.5]) + np.cross(spin, lever)
    np.testing.assert_allclose(found.velocity[1:-1, 2], expected[1:-1], atol=5e-3)


def test_dips_are_lifted_smoothly_and_the_rest_stays() -> None:
    poses = still(60)
    ground = float(humanoid().lowest(poses[:1])[0])
    poses[:, 2] -= ground  # its soles on the floor
    poses[30, 2] -= 0.1
    poses[40:, 2] += 0.05
    lifted = library.grounded(poses, 30, humanoid())
    low = humanoid().lowest(lifted)
    assert low.min() >= -1e-12
    change = lifted[:, 2] - poses[:, 2]
    assert change[30] == pytest.approx(0.1)
    assert np.abs(np.diff(change)).max() <= 0.1 / 9 + 1e-12
    np.testing.assert_array_equal(lifted[:22], poses[:22])
    np.testing.assert_array_equal(lifted[39:], poses[39:])


def turning_clip() -> Motion:
    """A quarter of a circle of 2 m, walked once and to be continued."""
    poses, angle = still(31), np.linspace(0, np.pi / 2, 31)
    poses[:, 0], poses[:, 1] = 2 * np.sin(angle), 2 - 2 * np.cos(angle)
    poses[:, 3:7] = rot.about_z(angle)
    return Motion("curve", np.arange(31) / RATE, poses, True, humanoid().joints)


def test_a_cycle_that_turns_goes_round_in_a_circle() -> None:
    clip = motions.close(turning_clip())
    poses = motions.resample(clip, RATE, 0, 121)
    angle = np.linspace(0, 2 * np.pi, 121)
    np.testing.assert_allclose(poses[:, 0], 2 * np.sin(angle), atol=1e-9)
    np.testing.assert_allclose(poses[:, 1], 2 - 2 * np.cos(angle), atol=1e-9)
    facing = rot.rotate(poses[:, 3:7], np.broadcast_to([1.0, 0, 0], (121, 3)))
    np.testing.assert_allclose(
        facing[:, :2], np.stack([np.cos(angle), np.sin(angle)], 1), atol=1e-9
    )


@needs_clips
def test_lookups_continue_loops_and_hold_the_end_of_others() -> None:
    known = library.build(fitted("walk", "kick"), RATE, 200, humanoid())
    walk, kick = known.cycles
    assert (known.num_motions, known.names) == (2, ("walk", "kick"))
    motion, time = np.array([0, 0, 1, 1]), np.array([5, 5 + 3 * walk, 5, 10_000])
    frames = known.frame(motion, time)
    np.testing.assert_allclose(frames.pose[1, 2:], frames.pose[0, 2:], atol=1e-9)
    np.testing.assert_allclose(frames.speed[1], frames.speed[0], atol=1e-9)
    (clip,) = fitted("walk")
    np.testing.assert_allclose(frames.pose[1, :2] - frames.pose[0, :2], 3 * clip.travel)
    last = known.frame(np.array([1]), np.array([kick - 1]))
    np.testing.assert_array_equal(frames.pose[3], last.pose[0])


@needs_clips
def test_no_clip_is_in_the_floor_and_no_speed_is_wild() -> None:
    known = library.build(fitted("all"), RATE, 60, humanoid())
    frames = known.frames
    assert humanoid().lowest(frames.pose).min() >= -1e-9
    assert np.abs(frames.velocity).max() < 12.0
    assert np.abs(frames.spin).max() < 40.0
