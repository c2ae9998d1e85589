"""Algorithms and reward sources: each is a config that plans and builds itself."""

ALGORITHMS = {
    "ppo": "etude.rl.ppo:PPOConfig",
    "sac": "etude.rl.sac:SACConfig",
    "td3": "etude.rl.td3:TD3Config",
    "rlpd": "etude.rl.rlpd:RLPDConfig",
    "xqc": "etude.rl.xqc:XQCConfig",
    "iql": "etude.rl.iql:IQLConfig",
    "dagger": "etude.rl.dagger:DAggerConfig",
    "bc": "etude.rl.bc:BCConfig",
    "reward-only": "etude.rl.reward_only:RewardOnlyConfig",
}
REWARDS = {
    "given": "etude.rl.rewards.given:GivenConfig",
    "rrd": "etude.rl.rewards.rrd:RRDConfig",
    "ircr": "etude.rl.rewards.ircr:IRCRConfig",
    "learned": "etude.rl.rewards.learned:LearnedConfig",
    "amp": "etude.rl.rewards.amp:AMPConfig",
}
