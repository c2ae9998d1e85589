"""The Unitree Go1, as an MJCF of primitive shapes."""

from pathlib import Path

MODEL = Path(__file__).parent / "go1.xml"
"""Kinematics, inertias and limits as published by Unitree; feet and trunk collide."""
FEET = ("FR", "FL", "RR", "RL")
"""Order of the legs: front right, front left, rear right, rear left."""
