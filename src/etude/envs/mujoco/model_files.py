"""Where a model is: a file, or a robot of MuJoCo Menagerie by its name."""

from __future__ import annotations

from pathlib import Path

from etude.core.errors import UsageError


def model_file(model: str | Path) -> Path:
    """An MJCF or URDF file, or that of a robot of MuJoCo Menagerie by its name.

    A name is "unitree_go1", which is the robot on its floor, or "unitree_go1/go1", which is one of
    its files. The package `mujoco-menagerie` finds it, and downloads it when it is first used.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    robot, _, entry = str(model).partition("/")
    if path.suffix or not robot.isidentifier() or "/" in entry:
        raise UsageError(f"There is no model file {path}.")
    try:
        import mujoco_menagerie as menagerie
    except ImportError:
        raise UsageError(
            f"There is no model file {path}. If {robot} is a robot of MuJoCo Menagerie, install "
            "its package: pip install mujoco-menagerie."
        ) from None
    try:
        return Path(menagerie.get(robot).xml(entry or None))
    except menagerie.UnknownRobotError as error:
        from etude.core.explain import nearest

        near = nearest(robot, menagerie.names())
        raise UsageError(
            f"There is no model file {path}, and no robot {robot} in MuJoCo Menagerie."
            + (f" Did you mean {near}?" if near else "")
        ) from error
    except menagerie.MenagerieError as error:
        raise UsageError(f"MuJoCo Menagerie cannot give {model}: {error}") from error
