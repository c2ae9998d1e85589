"""Dataset formats of this package: recognised, read and written in one file each."""

FORMATS = {
    "lerobot": "etude.data.formats.lerobot:LeRobotFormat",
    "robomimic": "etude.data.formats.robomimic:RobomimicFormat",
    "minari": "etude.data.formats.minari:MinariFormat",
}
"""{kind: "module:Class"}, in the order in which they are asked whether they recognise a file."""
