"""Deploy a policy: export it as ONNX, and run it without torch and without Etude.

    pip install 'etude[export]' ./runtime
    python examples/train.py
    python examples/deploy.py [--run runs/example] [--to runs/example-policy]

On a robot, only the exported folder and the package etude-runtime are needed (docs/export.md).
"""

import argparse

import etude
from etude_runtime import FixedRate, Policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/example")
    parser.add_argument("--to", default="runs/example-policy")
    options = parser.parse_args()

    run = etude.Run(options.run)
    exported = etude.export(run, options.to)
    check = exported.contract["check"]
    print(f"Exported to {exported.path}: {', '.join(sorted(exported.sizes))}")
    print(f"ONNX differs from torch by at most {check['largest_difference']:.0e}")

    # From here on: what a robot's computer does. Files that were changed are refused.
    policy = Policy.load(options.to)
    policy.check_joints([joint["name"] for joint in exported.contract["joints"]])
    for observation in policy.contract.observations:
        terms = ", ".join(f"{term.key} [{term.size}]" for term in observation.terms)
        print(f"The policy reads {terms}")

    # The training task stands in for the robot.
    env, successes = etude.make(run.recipe.name), 0
    for episode in range(20):
        policy.reset()
        (obs, _), over = env.reset(seed=episode), False
        while not over:
            action = policy.act_on_vectors({"state": obs})
            obs, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        successes += bool(info["is_success"])
    print(f"{successes} of 20 episodes succeed")

    # `act` takes the terms by name; a loop at the policy's rate counts missed deadlines.
    assert policy.period is not None
    still = {term.key: [0.0] * term.size for term in policy.contract.terms}
    rate = FixedRate(policy.period, steps=10)
    for _ in rate:
        policy.act(still)
    print(rate.timing)


if __name__ == "__main__":
    main()
