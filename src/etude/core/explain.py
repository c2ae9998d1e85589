"""Errors of pydantic as one sentence: the field, the value, the fix."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from etude.core.errors import KindError

_WANTED = {
    "missing": "is missing: add it",
    "too_few_values": "must have more values",
    "too_long": "must have {max_length} values at most",
    "too_short": "must have at least {min_length} value",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a list of names with values",
    "model": "must be a section of fields",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must be {expected_tags}",
    "union_tag_not_found": "must say its kind, as in `kind: reach`",
}
"""{pydantic's type of error, or its first word: what the value must be}."""
_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
MAX_PROBLEMS, MAX_NAME = 8, 100
"""Problems in one sentence and characters of a name; a file may have any number of both."""


def explain(
    error: ValidationError,
    model: type[BaseModel] | None,
    prefix: str = "",
    option: bool = False,
    whole: type[BaseModel] | None = None,
) -> str:
    """A pydantic error of `model` as one sentence.

    prefix: the section that the model is in `whole`, with a dot. option: name fields as on the
    command line, --section.some-field.
    """
    sentences: dict[str, str] = {}
    bounded: set[str] = set()
    problems = error.errors(include_url=False)
    for problem in problems[:MAX_PROBLEMS]:
        path, owner = _locate(problem["loc"], model)
        if problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
            problem["type"] = "too_few_values"
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, KindError):
            text = explain(inner.error, inner.model, f"{prefix}{path}.", option, model)
            sentences[path] = text.removesuffix(".")
            continue
        name = field_name(f"{prefix}{path}", option) if path else ""
        if problem["type"] == "extra_forbidden":
            near = _nearest_field(path, owner, model)
            if near:
                near = prefix + near
            elif whole is not None:
                near = nearest(prefix + path, field_paths(whole))
            hint = f"did you mean {field_name(near, option)}?" if near else "remove it"
            if near == prefix + path:
                hint = f"another kind of {prefix.rstrip('.')} has it"
            sentences[name] = f"there is no field {name} ({hint})"
        elif name not in bounded:
            # A union reports every member that does not fit: the last one is the widest, but a
            # bound says more.
            sentences[name] = _sentence(dict(problem), name, _can_be_none(path, owner))
        if problem["type"] in _BOUNDS:
            bounded.add(name)
    rest = len(problems) - MAX_PROBLEMS
    more = [f"and {rest:,} more"] if rest > 0 else []
    return "; ".join([*sentences.values(), *more]) + "."


def _nearest_field(
    path: str, owner: type[BaseModel] | None, model: type[BaseModel] | None
) -> str | None:
    """The field that an unknown path most likely stands for: in its own section, or elsewhere."""
    if owner is None or model is None:
        return None
    section, dot, name = path.rpartition(".")
    for field, aliases in getattr(owner, "aliases", {}).items():
        if name in aliases.split():
            return f"{section}{dot}{field}"
    inside = [f"{section}{dot}{name}" for name in owner.model_fields]
    elsewhere = [
        name for name in field_paths(model) if not (dot and name.startswith(section + dot))
    ]
    return nearest(path, inside) or nearest(path, elsewhere)


def _can_be_none(path: str, owner: type[BaseModel] | None) -> bool:
    """Whether a field accepts None, written as `none`."""
    fields = {} if owner is None else owner.model_fields
    field = fields.get(path.rpartition(".")[2])
    return field is not None and type(None) in typing.get_args(field.annotation)


def _sentence(problem: dict[str, Any], name: str, or_none: bool) -> str:
    """One problem, without a full stop."""
    kind, context, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "value_error":
        words = str(context.get("error", problem["msg"])).rstrip(".")
        # The message of a validator over several fields names them.
        return f"{name}: {words}" if name and not isinstance(value, dict | BaseModel) else words
    wanted = _WANTED.get(kind) or _WANTED.get(kind.split("_")[0])
    must = problem["msg"].replace("Input should be", "must be")
    if wanted is not None:
        must = wanted.format(**{key: _plain(text) for key, text in context.items()})
        must += " or none" if or_none and kind.split("_")[0] in ("int", "float") else ""
    if kind in ("missing", "union_tag_not_found"):
        return f"{name} {must}"
    if kind == "union_tag_invalid":
        name, value = f"{name}.kind", context["tag"]
    if not name:
        return f"the file {must}, for example `clock:`, not {_quoted(value)}"
    return f"{name} {must}, not {_short(str(value)) if _is_number(value) else _quoted(value)}"


def _locate(
    loc: tuple[int | str, ...], model: type[BaseModel] | None
) -> tuple[str, type[BaseModel] | None]:
    """(path, config with the field): "env.reward.hold" of ("env", "reach", "reward", "hold")."""
    names: list[str] = []
    here: Any = model
    owner: type[BaseModel] | None = None
    for part in (p if isinstance(p, int) else p[:MAX_NAME] for p in loc[:MAX_NAME]):
        models = _models(here)
        owner = models[0] if models else owner
        fields = {name: field for m in models for name, field in m.model_fields.items()}
        tagged = [m for m in models if len(models) > 1 and _tag(m) == part]
        if tagged:
            here = tagged[0]
        elif part in fields:
            here = fields[str(part)].annotation
            names.append(str(part))
        elif models or here is None:
            names.append(str(part))
            here = None
        else:
            break  # inside a list, or the name of a union's member
    return ".".join(names), owner


def _tag(model: type[BaseModel]) -> Any:
    kind = model.model_fields.get("kind")
    return None if kind is None else kind.default


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The config classes of an annotation: itself with its kinds, or the members of a union."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        derived = annotation.__subclasses__()  # the kinds of a base class
        return [annotation, *(kind for each in derived for kind in _models(each))]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Paths of all fields, section.field, without the sections themselves."""
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if not inner:
            yield f"{prefix}{name}"
        for each in inner:
            yield from field_paths(each, f"{prefix}{name}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted name that is most like a name; None if none is like it."""

    def likeness(other: str) -> tuple[float, float]:
        one, two = (n.rpartition(".")[2] for n in (name, other))
        return (
            difflib.SequenceMatcher(None, one, two).ratio(),
            difflib.SequenceMatcher(None, name, other).ratio(),
        )

    # The field itself must be similar: a common section makes all its fields similar.
    scores = {other: likeness(other) for other in known}
    start = f"{name.rpartition('.')[2]:<3}"  # three letters are enough: --env.tol
    close = [n for n, (field, _) in scores.items() if field >= 0.7]
    close = close or [n for n in scores if n.rpartition(".")[2].startswith(start)]
    return max(close, key=lambda other: sum(scores[other]), default=None)


def field_name(path: str, option: bool) -> str:
    """The name of a field in a file, or on the command line."""
    return "--" + path.replace("_", "-") if option else path


def _plain(value: Any) -> Any:
    """1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    """Whether a value or text is a number."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _quoted(value: Any) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
