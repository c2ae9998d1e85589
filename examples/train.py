"""Train from Python: plan a run, train it, look at it, and continue it.

    python examples/train.py [--steps 24576] [--folder runs/example]

A Kuka arm learns to hold its hand at a random point, which takes it about 20,000 steps.
"""

import argparse

import etude
from etude.plugin import Callback, Context


class Progress(Callback):
    """Prints a line for every evaluation in training."""

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        rate = metrics["eval/success_rate"]
        print(f"  {context.clock.now.timesteps:>7,} steps: {rate:.0%} of episodes succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24_576)
    parser.add_argument("--folder", default="runs/example")
    options = parser.parse_args()

    # A recipe holds every setting of a run; `replace` changes some and validates all.
    recipe = etude.recipes.reach_short().replace(
        seed=1, algorithm__learning_rate=2e-3, clock__total_timesteps=options.steps
    )

    # The plan says what the run will do, or why it cannot, before anything is simulated.
    counts = etude.plan(recipe).counts
    print(f"Planned: {counts['timesteps']:,} steps, {counts['updates']:,} gradient steps")

    run = etude.train(recipe, options.folder, callbacks=[Progress()])
    print(f"Trained in {run.path}; {run.exactness}")

    # The run continues with a larger budget, as it does after a kill.
    etude.resume(run.path, total_timesteps=2 * options.steps, callbacks=[Progress()])

    steps, returns = run.curves("rollout/ep_rew_mean")["rollout/ep_rew_mean"]
    print(
        f"Mean return: {returns[0]:.2f} at {steps[0]:,} steps, {returns[-1]:.2f} at {steps[-1]:,}"
    )
    fresh = run.evaluate(episodes=50)
    print(f"50 fresh episodes: {fresh['eval/success_rate']:.0%} succeed")


if __name__ == "__main__":
    main()
