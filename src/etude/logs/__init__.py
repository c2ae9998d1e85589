"""Logs: tables, the dashboard, TensorBoard, W&B."""

LOGS = {
    "tensorboard": "etude.logs.tensorboard:TensorBoardConfig",
    "wandb": "etude.logs.wandb:WandbConfig",
}
