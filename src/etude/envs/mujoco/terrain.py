"""Rough terrain as one height field: tiles of slopes, blocks and stairs, by level of difficulty."""

from __future__ import annotations

from collections.abc import Callable

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.envs.mujoco.task import Draws, Part

RESOLUTION = 0.1
"""Distance of the points of the height field, m."""
_PLATFORM = 0.8
"""Half the side of the level square in the middle of a tile, where episodes start, m."""
_STAIR = 0.3
"""Depth of a stair, m."""
_BLOCK = 4
"""Number of points along the side of a block."""
_FLOOR = 1.0
"""Thickness of the ground below the lowest point, m."""


def _rings(size: int) -> Array:
    """Distance [size, size] m from the platform along the farther axis; 0 on it."""
    away = np.abs(np.arange(size) - (size - 1) / 2) * RESOLUTION
    rings: Array = np.maximum(np.maximum(away[:, None], away[None]) - _PLATFORM, 0.0)
    return rings


def slope(difficulty: float, size: int, generator: np.random.Generator) -> Array:
    """A pyramid that rises to the platform, by up to 25 degrees."""
    rings = _rings(size)
    heights: Array = (rings.max() - rings) * 0.47 * difficulty
    return heights


def pit(difficulty: float, size: int, generator: np.random.Generator) -> Array:
    """A pyramid that falls to the platform, by up to 25 degrees."""
    return _rings(size) * 0.47 * difficulty


def stairs(difficulty: float, size: int, generator: np.random.Generator) -> Array:
    """Stairs of up to 15 cm that rise to the platform."""
    steps = np.ceil(_rings(size) / _STAIR - 1e-9)
    heights: Array = (steps.max() - steps) * 0.15 * difficulty
    return heights


def stairs_down(difficulty: float, size: int, generator: np.random.Generator) -> Array:
    """Stairs of up to 15 cm that fall to the platform."""
    return np.ceil(_rings(size) / _STAIR - 1e-9) * 0.15 * difficulty


def blocks(difficulty: float, size: int, generator: np.random.Generator) -> Array:
    """Square blocks of random heights of up to 16 cm."""
    count = -(-size // _BLOCK)
    heights = generator.uniform(0.0, 0.16 * difficulty, (count, count))
    field = np.kron(heights, np.ones((_BLOCK, _BLOCK)))[:size, :size]
    return np.where(_rings(size) > 0, field, 0.08 * difficulty)


KINDS: dict[str, Callable[[float, int, np.random.Generator], Array]] = {
    "slope": slope,
    "pit": pit,
    "blocks": blocks,
    "stairs": stairs,
    "stairs_down": stairs_down,
}


class Terrain(Part):
    """A grid of tiles, one row per level and one column per kind; episodes start in the middle of
    one.

    Each episode draws its level and kind. The curriculum's level, from 0 to 1, is the fraction of
    the levels to draw from. `in_turn`: environment i starts on tile i, for evaluation. The border
    is 2 m of flat ground.
    """

    def __init__(
        self, levels: int = 8, tile: float = 8.0, seed: int = 0, in_turn: bool = False
    ) -> None:
        self.kinds, self.levels, self._in_turn = tuple(KINDS), levels, in_turn
        size = round(tile / RESOLUTION)
        self._border = round(2.0 / RESOLUTION)
        self.heights: Array = self._field(size, seed)
        """[points along x, points along y] m: levels along x, kinds along y."""
        self._tile = size * RESOLUTION
        self._share = 1.0
        self._origin = -np.array(self.heights.shape) * RESOLUTION / 2

    def _field(self, size: int, seed: int) -> Array:
        generator = np.random.default_rng(seed)
        rows = [
            np.concatenate(
                [make((level + 1) / self.levels, size, generator) for make in KINDS.values()],
                axis=1,
            )
            for level in range(self.levels)
        ]
        return np.pad(np.concatenate(rows), self._border).astype(np.float32).astype(np.float64)

    def edit(self, spec: mujoco.MjSpec) -> None:
        if any(geom.name == "floor" for geom in spec.geoms):
            raise UsageError("The model already has a floor: remove it, the terrain replaces it.")
        nx, ny = self.heights.shape
        top = max(float(self.heights.max()), 1e-3)
        field = spec.add_hfield(name="terrain")
        field.nrow, field.ncol = ny, nx
        half = (np.array([nx, ny]) - 1) * RESOLUTION / 2
        field.size = (*half, top, _FLOOR)
        field.userdata = (self.heights.T / top).astype(np.float32).ravel()
        geom = spec.worldbody.add_geom(name="floor", type=mujoco.mjtGeom.mjGEOM_HFIELD)
        geom.hfieldname, geom.contype, geom.conaffinity = "terrain", 0, 1
        geom.rgba = (0.55, 0.6, 0.65, 1.0)
        self._origin = -half

    def bind(self) -> None:
        self.level = self.env.state("terrain/level", dtype="int64")
        """[num_envs]: the level that each episode started on."""
        self.kind = self.env.state("terrain/kind", dtype="int64")
        """[num_envs]: an index into `kinds`."""

    def follow(self, curriculum: Tree) -> None:
        """Set the fraction of the levels that new episodes start on."""
        self._share = float(curriculum.get("level", 1.0))

    def reset(self, env_ids: Array, draws: Draws) -> None:
        if self._in_turn:
            tile = env_ids % (self.levels * len(self.kinds))
            self.level[env_ids], self.kind[env_ids] = np.divmod(tile, len(self.kinds))
            return
        most = max(1, round(self._share * self.levels))
        self.level[env_ids] = draws.integers("terrain/level", 0, most - 1)
        self.kind[env_ids] = draws.integers("terrain/kind", 0, len(self.kinds) - 1)

    @property
    def tile(self) -> Array:
        """[num_envs]: level x number of kinds + kind."""
        return self.level * len(self.kinds) + self.kind

    def start(self, env_ids: Array) -> Array:
        """[k, 3] m: the point on the ground in the middle of each environment's tile."""
        tile = np.stack([self.level[env_ids], self.kind[env_ids]], axis=1)
        xy = self._origin + self._border * RESOLUTION + (tile + 0.5) * self._tile
        return np.concatenate([xy, self.height_at(xy)[:, None]], axis=1)

    def height_at(self, points: Array) -> Array:
        """Height [...] m of the ground at points [..., 2], interpolated bilinearly."""
        place = (points - self._origin) / RESOLUTION
        last = np.array(self.heights.shape) - 2
        corner = np.clip(np.floor(place).astype(np.int64), 0, last)
        u, v = np.moveaxis(np.clip(place - corner, 0.0, 1.0), -1, 0)
        i, j = np.moveaxis(corner, -1, 0)
        h = self.heights
        low = h[i, j] * (1 - u) + h[i + 1, j] * u
        high = h[i, j + 1] * (1 - u) + h[i + 1, j + 1] * u
        found: Array = low * (1 - v) + high * v
        return found
