"""Algorithms and reward sources: each is a config that plans and builds itself."""

ALGORITHMS = {
    "ppo": "etude.algorithms.ppo:PPOConfig",
    "sac": "etude.algorithms.sac:SACConfig",
    "td3": "etude.algorithms.td3:TD3Config",
    "rlpd": "etude.algorithms.rlpd:RLPDConfig",
    "iql": "etude.algorithms.iql:IQLConfig",
    "dagger": "etude.algorithms.dagger:DAggerConfig",
    "bc": "etude.algorithms.bc:BCConfig",
    "reward-only": "etude.algorithms.reward_only:RewardOnlyConfig",
}
REWARDS = {
    "given": "etude.algorithms.rewards:GivenConfig",
    "rrd": "etude.algorithms.rrd:RRDConfig",
    "ircr": "etude.algorithms.ircr:IRCRConfig",
    "learned": "etude.algorithms.learned:LearnedConfig",
    "amp": "etude.algorithms.amp:AMPConfig",
}
