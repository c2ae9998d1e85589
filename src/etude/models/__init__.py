"""Networks, distributions, normalisers, and policies made of them."""

CLASSES = {
    "mlp": "etude.models.actor_critic:MlpPolicy",
    "lstm": "etude.models.recurrent:RecurrentPolicy",
    "gru": "etude.models.recurrent:RecurrentPolicy",
    "squashed": "etude.models.actors:SquashedPolicy",
    "deterministic": "etude.models.actors:DeterministicPolicy",
}
"""{kind: class of the policy}; all have the same config."""
PURPOSES = {
    "mlp": "For PPO: separate networks for actions and values, without memory.",
    "lstm": "For PPO: an LSTM between encoder and heads, with memory within an episode.",
    "gru": "For PPO: a GRU in place of the LSTM.",
    "squashed": "For SAC: a normal distribution squashed by tanh, its spread learned per state.",
    "deterministic": "For TD3: one action per state; noise is added to explore.",
}
"""{kind: description} for `etude list --kinds`."""
CHUNKS = {
    "act": "For bc: a transformer that predicts chunks of actions, with temporal ensembling.",
    "flow": "For bc: the same by flow matching, for demonstrations with several solutions.",
}
"""{kind: description} of policies with action chunks."""
PURPOSES |= CHUNKS
POLICIES = dict.fromkeys(CLASSES, "etude.models.policies:PolicyConfig")
POLICIES |= dict.fromkeys(CHUNKS, "etude.models.chunks:ChunkPolicyConfig")
