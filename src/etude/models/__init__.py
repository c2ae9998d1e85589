"""Networks, distributions, normalisers, and policies made of them."""

CLASSES = {
    "mlp": "etude.models.policies:MlpPolicy",
    "lstm": "etude.models.recurrent:RecurrentPolicy",
    "gru": "etude.models.recurrent:RecurrentPolicy",
    "squashed": "etude.models.actors:SquashedPolicy",
    "deterministic": "etude.models.actors:DeterministicPolicy",
}
"""What each kind of policy is; all of them have one config."""
POLICIES = dict.fromkeys(CLASSES, "etude.models.policies:PolicyConfig")
