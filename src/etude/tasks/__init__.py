"""Tasks on MuJoCo's batch engine: each has a folder with its config, scene, terms and recipes."""

ENVS = {
    "reach": "etude.tasks.reach.task:ReachConfig",
    "pick-place": "etude.tasks.pick_place.task:PickPlaceConfig",
    "imitation": "etude.tasks.imitation.task:ImitationConfig",
}
