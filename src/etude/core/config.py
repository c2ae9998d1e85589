"""Base class of all configs: frozen, keyword-only, no unknown fields, help for each field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)

from etude.core.errors import UsageError

LARGEST = 10**18
"""Bound of the absolute value of every number in a config whose field has no other bound: counters
are 64-bit, arrays float32."""
SECONDS = 1e9
"""Longest wait that a field accepts: thirty years; operating systems refuse more."""
_NO_SCHEMA = ("default", "metadata")


def _bounded(schema: Any) -> Any:
    """Add a lower and an upper bound to every number of a pydantic schema."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_bounded, schema))
    if not isinstance(schema, dict):
        return schema
    found = {n: part if n in _NO_SCHEMA else _bounded(part) for n, part in schema.items()}
    if found.get("type") in ("int", "float"):
        if found.keys().isdisjoint({"le", "lt"}):
            found["le"] = LARGEST
        if found.keys().isdisjoint({"ge", "gt"}):
            found["ge"] = -LARGEST
    return found


class Config(BaseModel):
    """Options of one part of a run, defined beside that part."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """{earlier name: field}, for recipes of earlier versions and for error messages."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """{field: "its names in other libraries"}, for error messages about unknown fields."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _bounded(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _by_earlier_names(cls, given: Any) -> Any:
        if not isinstance(given, dict) or cls.renamed.keys().isdisjoint(given):
            return given
        return {cls.renamed.get(name, name): value for name, value in given.items()}

    def replace(self, name: str = "", value: Any = None, /, **fields: Any) -> Self:
        """A copy with some fields changed, validated like the original.

        `recipe.replace("algorithm.learning_rate", 1e-4)`, or several at once with two underscores
        for the dot: `recipe.replace(seed=1, algorithm__learning_rate=1e-4)`.
        """
        changes = {field.replace("__", "."): each for field, each in fields.items()}
        return self._changed({name: value, **changes} if name else changes)

    def _changed(self, changes: dict[str, Any]) -> Self:
        """A copy with values at dotted names; validation errors are one sentence."""
        content = self._content(changes)
        # The name of a kind given as module:Class is not in the Literal of its class.
        kind = {} if "kind" in changes else {"kind": content.pop("kind", None)}
        try:
            made = type(self).model_validate(content)
        except ValidationError as error:
            from etude.core.explain import explain

            raise UsageError(explain(error, type(self))) from error
        return made.model_copy(update=kind) if kind.get("kind") else made

    def _content(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The fields that are set, with changes at dotted names, as plain data."""
        content = {name: getattr(self, name) for name in self.model_fields_set}
        inside: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, dot, rest = name.partition(".")
            if dot:
                inside.setdefault(section, {})[rest] = value
            else:
                content[name] = value
        for section, given in inside.items():
            here = content.get(section, getattr(self, section, {}))
            if isinstance(here, Config):
                content[section] = here._content(given)
                if hasattr(here, "kind"):
                    content[section].setdefault("kind", here.kind)
            elif here is None or here == {}:
                content[section] = given
            else:
                field = next(iter(given))
                raise UsageError(f"{section} is a value, not a section: it has no field {field}.")
        return content

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with fields changed, unvalidated; unknown fields raise."""
        for name in (each for each in update or () if each not in type(self).model_fields):
            raise UsageError(
                f"{type(self).__name__} has no field {name}: `replace({name}=...)` suggests the "
                "right name, and validates the value."
            )
        return super().model_copy(update=update, deep=deep)


AbsolutePath = Annotated[
    str, AfterValidator(lambda path: str(Path(path).absolute()) if path else path)
]
"""An absolute path, or "": a run must find the file from any working directory."""
