"""Logs: tables, the dashboard, TensorBoard, W&B."""

LOGS = {
    "tensorboard": "etude.training.logs.tensorboard:TensorBoardConfig",
    "wandb": "etude.training.logs.wandb:WandbConfig",
}
