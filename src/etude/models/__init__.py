"""Networks, distributions, normalisers, and policies made of them."""

CLASSES = {
    "mlp": "etude.models.actor_critic:MlpPolicy",
    "lstm": "etude.models.recurrent:RecurrentPolicy",
    "gru": "etude.models.recurrent:RecurrentPolicy",
    "squashed": "etude.models.actors:SquashedPolicy",
    "deterministic": "etude.models.actors:DeterministicPolicy",
}
"""What each kind of policy is; all of them have one config."""
PURPOSES = {
    "mlp": "For PPO: separate networks for actions and values, without memory.",
    "lstm": "For PPO: an LSTM between encoder and heads, which remembers within an episode.",
    "gru": "For PPO: a GRU in place of the LSTM.",
    "squashed": "For SAC: a normal distribution squashed by tanh, its spread learned per state.",
    "deterministic": "For TD3: one action per state; noise is added to explore.",
}
"""What each kind is for, as `etude list --kinds` says it."""
CHUNKS = {
    "act": "For bc: a transformer that gives a chunk of actions, averaged over predictions.",
    "flow": "For bc: the same by flow matching, which keeps several ways to do a thing apart.",
}
"""What each kind of policy with chunks of actions is for."""
PURPOSES |= CHUNKS
POLICIES = dict.fromkeys(CLASSES, "etude.models.policies:PolicyConfig")
POLICIES |= dict.fromkeys(CHUNKS, "etude.models.chunks:ChunkPolicyConfig")
