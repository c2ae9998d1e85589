"""Tasks on MuJoCo: each has a file or folder with its config, scene, terms, expert and recipes."""

ENVS = {
    "reach": "etude.tasks.reach:ReachConfig",
    "pick-place": "etude.tasks.pick_place.task:PickPlaceConfig",
    "walk-go1": "etude.tasks.velocity:WalkConfig",
    "track": "etude.tasks.tracking:TrackConfig",
}
GROUPS = {
    "etude.tasks.reach": "Reaching a point",
    "etude.tasks.pick_place.recipes": "Pick and place",
    "etude.tasks.velocity": "Walking",
    "etude.tasks.humanoid": "Imitating motion",
    "etude.tasks.tracking": "Tracking motion with a robot of your own",
    "etude.tasks.gym_recipes": "Gymnasium, PettingZoo and tasks in numpy",
    "etude.tasks.dataset_recipes": "Learning from a dataset",
}
"""{module of recipes: its title in `etude list`}."""
RECIPES = {
    "reach": "etude.tasks.reach:reach",
    "reach-short": "etude.tasks.reach:reach_short",
    "reach-memory": "etude.tasks.reach:reach_memory",
    "reach-at-scale": "etude.tasks.reach:reach_at_scale",
    "pick-place": "etude.tasks.pick_place.recipes:pick_place",
    "pick-place-original": "etude.tasks.pick_place.recipes:pick_place_original",
    "pick-place-sac": "etude.tasks.pick_place.recipes:pick_place_sac",
    "pick-place-rlpd": "etude.tasks.pick_place.recipes:pick_place_rlpd",
    "pick-place-anywhere": "etude.tasks.pick_place.recipes:pick_place_anywhere",
    "pick-place-bc": "etude.tasks.pick_place.recipes:pick_place_bc",
    "pick-place-pictures": "etude.tasks.pick_place.recipes:pick_place_pictures",
    "walk-go1": "etude.tasks.velocity:walk_go1",
    "walk-go1-robust": "etude.tasks.velocity:walk_go1_robust",
    "walk-go1-rough": "etude.tasks.velocity:walk_go1_rough",
    "walk-go1-student": "etude.tasks.velocity:walk_go1_student",
    "imitate-walk": "etude.tasks.humanoid:imitate_walk",
    "imitate-backflip": "etude.tasks.humanoid:imitate_backflip",
    "imitate-all": "etude.tasks.humanoid:imitate_all",
    "amp-walk": "etude.tasks.humanoid:amp_walk",
    "amp-clips": "etude.tasks.humanoid:amp_clips",
    "track": "etude.tasks.tracking:track",
    "track-g1": "etude.tasks.tracking:track_g1",
    "ppo": "etude.tasks.gym_recipes:ppo",
    "spread": "etude.tasks.gym_recipes:spread",
    "seek-pictures": "etude.tasks.gym_recipes:seek_pictures",
    "sac": "etude.tasks.gym_recipes:sac",
    "td3": "etude.tasks.gym_recipes:td3",
    "episodic": "etude.tasks.reach:episodic",
    "episodic-ircr": "etude.tasks.reach:episodic_ircr",
    "offline": "etude.tasks.dataset_recipes:offline",
    "offline-pictures": "etude.tasks.dataset_recipes:offline_pictures",
    "rlpd": "etude.tasks.dataset_recipes:rlpd",
    "iql": "etude.tasks.dataset_recipes:iql",
    "bc": "etude.tasks.dataset_recipes:bc",
    "reward-only": "etude.tasks.dataset_recipes:reward_only",
}
TUNED = {
    env_id: f"etude.tasks.gym_recipes:{env_id.partition('-')[0].lower()}"
    for env_id in (
        *("CartPole-v1", "Pendulum-v1", "LunarLander-v3", "BipedalWalker-v3"),
        *("Reacher-v5", "Swimmer-v5", "Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5"),
        "Humanoid-v5",
    )
}
"""{id of Gymnasium: the recipe with settings that were tuned for it}."""
RECIPES |= {target.partition(":")[2]: target for target in TUNED.values()}
