"""Networks, distributions, normalisers, and policies made of them."""

POLICIES = dict.fromkeys(
    ("mlp", "lstm", "gru", "squashed", "deterministic"), "etude.models.actor_critic:PolicyConfig"
)
