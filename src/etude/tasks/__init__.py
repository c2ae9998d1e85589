"""Tasks on MuJoCo's batch engine: each has a folder with its config, scene, terms and recipes."""

ENVS = {
    "reach": "etude.tasks.reach.task:ReachConfig",
    "pick-place": "etude.tasks.pick_place.task:PickPlaceConfig",
    "imitation": "etude.tasks.imitation.task:ImitationConfig",
    "walk-go1": "etude.tasks.velocity.task:WalkConfig",
}
RECIPES = {
    "reach": "etude.tasks.reach.recipes:reach",
    "reach-short": "etude.tasks.reach.recipes:reach_short",
    "reach-memory": "etude.tasks.reach.recipes:reach_memory",
    "reach-at-scale": "etude.tasks.reach.recipes:reach_at_scale",
    "pick-place": "etude.tasks.pick_place.recipes:pick_place",
    "pick-place-original": "etude.tasks.pick_place.recipes:pick_place_original",
    "pick-place-sac": "etude.tasks.pick_place.sac:pick_place_sac",
    "pick-place-anywhere": "etude.tasks.pick_place.recipes:pick_place_anywhere",
    "walk-go1": "etude.tasks.velocity.recipes:walk_go1",
    "walk-go1-rough": "etude.tasks.velocity.recipes:walk_go1_rough",
    "imitate-walk": "etude.tasks.imitation.recipes:imitate_walk",
    "imitate-backflip": "etude.tasks.imitation.recipes:imitate_backflip",
    "imitate-all": "etude.tasks.imitation.recipes:imitate_all",
    "amp-walk": "etude.tasks.imitation.recipes:amp_walk",
    "amp-clips": "etude.tasks.imitation.recipes:amp_clips",
    "ppo": "etude.tasks.gym_recipes:ppo",
    "halfcheetah": "etude.tasks.gym_recipes:halfcheetah",
    "spread": "etude.tasks.gym_recipes:spread",
    "sac": "etude.tasks.gym_replay:sac",
    "td3": "etude.tasks.gym_replay:td3",
    "episodic": "etude.tasks.reach.episodic:episodic",
    "episodic-ircr": "etude.tasks.reach.episodic:episodic_ircr",
    "offline": "etude.tasks.dataset_recipes:offline",
    "reward-only": "etude.tasks.dataset_recipes:reward_only",
}
