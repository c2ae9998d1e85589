"""The base of every config: frozen, keyword-only, nothing unknown, each field with its help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator


class Config(BaseModel):
    """What a person may choose about one part; it lives beside the part it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """{earlier name: field}: recipes of earlier versions are read, and options are explained."""

    @model_validator(mode="before")
    @classmethod
    def _by_earlier_names(cls, given: Any) -> Any:
        if not isinstance(given, dict) or cls.renamed.keys().isdisjoint(given):
            return given
        return {cls.renamed.get(name, name): value for name, value in given.items()}


AbsolutePath = Annotated[
    str, AfterValidator(lambda path: str(Path(path).absolute()) if path else path)
]
"""A path, or "": a run that is read from another folder must find what it names."""


class KindError(ValueError):
    """A config that its kind refuses; `explain` names the fields."""

    def __init__(self, error: ValidationError, model: type[Config]) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model
