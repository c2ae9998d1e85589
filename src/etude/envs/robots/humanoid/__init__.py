"""A humanoid of 15 bodies and 50 kg, as an MJCF of primitive shapes, for DeepMimic's clips."""

MODEL = "etude/envs/robots/humanoid/humanoid.xml"
"""Place of the model in the installed package."""
ENDS = ".*_(wrist|ankle)"
"""Hands and feet."""
LEAD = 0.05
"""s: damping over stiffness of the servos, by which their targets lead a motion."""
CROSSINGS = {
    "backflip": ("left_wrist right_wrist", "right_hip right_wrist"),
    "getup_faceup": ("right_elbow right_hip", "right_hip right_wrist"),
    "punch": ("left_knee right_ankle",),
    "spin": (
        *("chest left_elbow", "chest left_wrist", "root left_elbow", "root left_wrist"),
        *("root right_elbow", "root right_wrist", "right_hip right_wrist"),
        *("left_hip left_wrist", "left_wrist right_wrist"),
    ),
}
"""{clip: pairs of bodies that are more than 20 mm inside each other in it}, because the people who
were recorded had other proportions. Who tracks these clips lets the pairs pass."""
