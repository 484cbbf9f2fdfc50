"""Residual branches on frozen maps, and their training."""

from kvbridge.mappers.residual.documents import training_text
from kvbridge.mappers.residual.training import finish, prepare_training, train_residual, training_plan

__all__ = ["finish", "prepare_training", "train_residual", "training_plan", "training_text"]
