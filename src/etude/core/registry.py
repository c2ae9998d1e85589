"""Kinds: the choices for each section of a recipe, and the config class behind every name.

A kind is a config class with a field `kind`; it builds its object and writes its part of the
plan. Three places are searched for a name:

1. this package: a list in the `__init__.py` of the kinds' folder, {name: "module:Class"};
2. installed packages: the entry points of a group such as `etude.algorithms`;
3. `module:Class` or `file.py:Class`, which must be trusted if a recipe file names it.

Listing names imports no module; the module of a kind is imported when a recipe uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import PydanticKnownError

from etude.core.catalogue import KINDS, Catalogue, load_attribute
from etude.core.config import Config
from etude.core.errors import KindError, UsageError, describe_error

C = TypeVar("C", bound=Config)


class Registry(Catalogue, Generic[C]):
    """The kinds of one section of a recipe."""

    def __init__(
        self,
        section: str,
        base: str,
        default: str | None = None,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        """`base`: base class of the configs, as module:Class. `default`: kind of a section without
        the field `kind`. `removed`: {kind that was removed: what to use, as a sentence}."""
        super().__init__(*KINDS[section])
        self.section, self._base, self._default = section, base, default
        self._removed = {} if removed is None else removed

    def has(self, name: str) -> bool:
        """Whether a name can be a kind: it is listed, or names code."""
        return name in self.names() or ":" in name

    def check(self, name: str, prefix: str = "") -> None:
        """Raise for an unknown kind; the message begins with `prefix` and the section."""
        if name in self._removed:
            raise UsageError(f"{prefix}{self._removed[name]}")
        if not self.has(name):
            raise UsageError(f"{prefix}{self.section}.kind must be {self._known()}, not '{name}'.")

    def _known(self) -> str:
        *most, last = (f"'{kind}'" for kind in self.names())
        return f"{', '.join(most)} or {last}" if most else last

    def load(self, name: str) -> type[C]:
        """The config class of a kind; raises for an unknown one."""
        built_in, installed = self.built_in(), self.installed()
        if name in built_in:
            return cast(type[C], load_attribute(built_in[name]))
        if name in installed:
            found = _load_entry(installed[name])
        elif ":" in name:
            from etude.core.user_code import load_object

            found = load_object(name, "module:Class")
        elif name in self._removed:
            raise ValueError(self._removed[name])
        else:
            context = {"discriminator": "'kind'", "tag": name, "expected_tags": self._known()}
            raise PydanticKnownError("union_tag_invalid", context)
        base = load_attribute(self._base)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise UsageError(
                f"{self.section}.kind {name} must be a class derived from "
                f"{self._base.replace(':', '.')}."
            )
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise UsageError(
                f"{self.section}.kind {name} is not finished: the class must define "
                f"{' and '.join(f'`{method}`' for method in missing)}."
            )
        return cast(type[C], found)

    def make(self, name: str) -> C:
        """A config of a kind with default values."""
        return self.validate({"kind": name})

    def convert(self, section: Config | None, kind: str) -> C:
        """Convert a section to another kind; keeps fields if one kind derives from the other."""
        self.check(kind)
        there, wanted = type(section), self.load(kind)
        if section is None or not (issubclass(wanted, there) or issubclass(there, wanted)):
            return self.make(kind)
        kept = section.model_dump(include=set(wanted.model_fields), exclude_unset=True)
        return self.validate(kept | {"kind": kind})

    def validate(self, value: Any) -> C:
        """Validate plain data with the field `kind`; a config is returned unchanged."""
        if isinstance(value, Config) and type(value) is not self.load(value.kind):  # type: ignore[attr-defined]
            value = value.model_dump()
        if not isinstance(value, dict):
            return cast(C, value)
        if "kind" not in value and self._default is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        name = value.get("kind", self._default)
        # Trust is checked for texts only: another type must not select a class.
        name = name if isinstance(name, str) else type(name).__name__
        model = self.load(name)
        try:
            made = model.model_validate({k: v for k, v in value.items() if k != "kind"})
        except ValidationError as error:
            raise KindError(error, model) from error
        # A class named by module:Class or by an entry point keeps that name in its config.
        named = made.model_dump(include={"kind"}) == {"kind": name}
        return made if named else made.model_copy(update={"kind": name})


def _load_entry(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # user code may raise anything
        raise UsageError(
            f"The entry point '{entry.name}' of {entry.group} cannot be loaded: "
            f"{describe_error(error)}."
        ) from error
