"""The base of every config: frozen, keyword-only, nothing unknown, each field with its help."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """What a person may choose about one part; it lives beside the part it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class KindError(ValueError):
    """A config that its kind refuses; `explain` names the fields."""

    def __init__(self, error: ValidationError, model: type[Config]) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model
