"""A recipe that uses all of it."""

from etude.plugin import ClockConfig, CollectorConfig, EvaluationConfig, LogsConfig, Recipe
from etude_plugin.balance import BalanceConfig
from etude_plugin.calm import CalmConfig
from etude_plugin.csv_log import CsvConfig
from etude_plugin.reinforce import ReinforceConfig
from etude_plugin.residual import ResidualConfig


def balance() -> Recipe:
    """REINFORCE learns to keep a pole upright, calmly."""
    return Recipe(
        name="balance",
        env=BalanceConfig(),
        policy=ResidualConfig(),
        rewards=CalmConfig(),
        algorithm=ReinforceConfig(),
        collector=CollectorConfig(num_envs=64, envs_per_group=32),
        clock=ClockConfig(total_timesteps=60_000, cycles=5, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=32, num_envs=32, envs_per_group=32),
        logs=LogsConfig(writers=(CsvConfig(),)),
    )
