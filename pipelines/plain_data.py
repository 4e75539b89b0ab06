"""Typed data from plain data, as it comes out of JSON: every field checked, none unknown, none missing."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints


class ReportError(ValueError):
    """The data of a report contradicts itself or does not have the report's form."""


T = TypeVar("T")


def from_plain(cls: type[T], data: Any, where: str) -> T:
    """A dataclass from plain data. Raises ReportError that names the first field that is wrong; `where` is what the whole is called."""
    if not isinstance(data, Mapping):
        raise ReportError(f"{where} must be an object, not {type(data).__name__}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ReportError(f"{where} has unknown fields: {', '.join(unknown)}")
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - set(data)):
        raise ReportError(f"{where} lacks: {', '.join(missing)}")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None and types.NoneType in arguments else _value(arguments[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ReportError(f"{where} must be a list, not {type(value).__name__}")
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ReportError(f"{where} must be an object, not {type(value).__name__}")
        return {str(key): _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    number = hint is float and isinstance(value, int) and not isinstance(value, bool)
    if not (number or isinstance(value, hint)) or (isinstance(value, bool) and hint is not bool):
        raise ReportError(f"{where} must be {hint.__name__}, not {value!r}")
    return float(value) if number else value
