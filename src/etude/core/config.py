"""The base of every config: frozen, keyword-only, nothing unknown, each field with its help."""

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
"""Of every number in a config, in both directions, where its field names no bound of its own:
counters are 64-bit, and arrays float32."""


SECONDS = 1e9
"""Longest wait of a field: thirty years; systems refuse more."""
_NO_SCHEMA = ("default", "metadata")


def _bounded(schema: Any) -> Any:
    """A schema of pydantic's in which every number has a lower and an upper bound."""
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
    """What a person may choose about one part; it lives beside the part it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """{earlier name: field}: recipes of earlier versions are read, and options are explained."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """{field: "its names in other libraries"}: who writes one of them is told the field's."""

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
        """A copy with values at dotted names; what is wrong is one sentence."""
        content = self._content(changes)
        # A kind that is known by module:Class is not what its own class declares.
        kind = {} if "kind" in changes else {"kind": content.pop("kind", None)}
        try:
            made = type(self).model_validate(content)
        except ValidationError as error:
            from etude.core.explain import explain

            raise UsageError(explain(error, type(self))) from error
        return made.model_copy(update=kind) if kind.get("kind") else made

    def _content(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The fields that were given, with values at dotted names, as plain data."""
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
                raise UsageError(f"{section} is a value and no section: it has no field {field}.")
        return content

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with fields changed, unvalidated; names that are no fields are refused."""
        for name in (each for each in update or () if each not in type(self).model_fields):
            raise UsageError(
                f"{type(self).__name__} has no field {name}: `replace({name}=...)` says which is "
                "meant, and checks the value as well."
            )
        return super().model_copy(update=update, deep=deep)


AbsolutePath = Annotated[
    str, AfterValidator(lambda path: str(Path(path).absolute()) if path else path)
]
"""A path, or "": a run that is read from another folder must find what it names."""
