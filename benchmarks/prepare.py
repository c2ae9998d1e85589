"""Make an environment of its own for each peer, with the versions of benchmarks/requirements.

    python benchmarks/prepare.py stable_baselines3 skrl [--environments .venv-peers]
    python benchmarks/prepare.py --all

benchmarks/requirements/PEER.txt names every package of an environment with its version, so they are
installed without asking what they depend on: some peers pin versions that the tasks cannot have.
torch comes first, alone, so that a CPU build of that version is taken where there is one. What does
not install leaves PEER.error.txt, which `run.py` records. uv is used where it is on the path.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / ".venv-peers"
SHARED = {
    "etude_recipe": "etude",
    "cleanrl_style": "etude",
    "stable_baselines3_processes": "stable_baselines3",
    "stable_baselines3_eight": "stable_baselines3",
}
"""{peer: the peer whose environment it runs in}."""
NOT_THERE = "it has no environment yet"


def python_of(peer: str, environments: Path) -> Path:
    """The interpreter of a peer's environment."""
    return environments / SHARED.get(peer, peer) / "bin" / "python"


def error_of(peer: str, environments: Path) -> str | None:
    """Why a peer could not be installed; None if it could."""
    path = environments / f"{SHARED.get(peer, peer)}.error.txt"
    if path.exists():
        return path.read_text().strip()
    if not python_of(peer, environments).exists():
        return NOT_THERE
    return None


def prepare(peer: str, environments: Path) -> bool:
    """Make a peer's environment anew; False if it does not install."""
    folder, error = environments / peer, environments / f"{peer}.error.txt"
    environments.mkdir(parents=True, exist_ok=True)
    error.unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python, wanted = str(python_of(peer, environments)), REQUIREMENTS / f"{peer}.txt"
    uv = shutil.which("uv")
    pip = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    torch = [line for line in wanted.read_text().splitlines() if line.startswith("torch==")]
    steps = [[*pip, *torch]] if torch else []
    for command in [*steps, [*pip, "--no-deps", "-r", str(wanted)]]:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            error.write_text(done.stdout[-4000:])
            return False
    return True


def main(arguments: list[str] | None = None) -> int:
    known = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(known))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--environments", type=Path, default=DEFAULT)
    options = parser.parse_args(arguments)
    wanted = known if options.all else [SHARED.get(peer, peer) for peer in options.peers]
    if not wanted or not set(wanted) <= set(known):
        parser.error(f"name peers among {', '.join(known)}, or --all")
    for peer in dict.fromkeys(wanted):
        good = prepare(peer, options.environments.resolve())
        print(f"{peer}: {'ready' if good else 'does not install'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
