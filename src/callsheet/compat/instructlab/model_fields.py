"""Gives dataclasses pydantic's `model_fields`, `model_dump()` and conversion of values, which code for InstructLab uses.

pydantic need not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, get_args, get_type_hints

from callsheet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One entry of `model_fields`, with the attributes of pydantic's `FieldInfo` that code for InstructLab reads."""

    annotation: Any
    default: Any
    exclude: bool | None = None
    description: str | None = None
    required: bool = False

    def is_required(self) -> bool:
        """Return whether the constructor requires a value for the field."""
        return self.required

    def get_default(self) -> Any:
        """Return the field's default, or `...` if the field has no default."""
        return self.default


class _ModelFields:
    """A descriptor that computes a dataclass's attribute `model_fields` when this attribute is read."""

    def __get__(self, instance: object, owner: Any) -> MappingProxyType[str, FieldInfo]:
        return MappingProxyType({each.name: _info(each) for each in fields(owner)})


class HasModelFields:
    """The base of InstructLab's argument classes: it gives them pydantic's `model_fields`, `model_dump` and conversion of values."""

    model_fields: ClassVar[Any] = _ModelFields()

    def model_dump(self) -> dict[str, Any]:
        """Return the fields as a dict, except for those that are excluded by their metadata, such as `callbacks`."""
        given: Any = self
        kept = [each.name for each in fields(given) if not each.metadata.get("exclude")]
        return {name: _dump(getattr(self, name)) for name in kept}

    def convert_fields(self) -> None:
        """Convert the fields to their types, as pydantic does: the string "2e-5" to a float, for example.

        Fields of other types than numbers, truth values, strings and pairs of numbers are left as they are.

        Raises:
            ConfigError: a value cannot be converted; the message names the field.
        """
        for name, kind in get_type_hints(type(self)).items():
            convert = _CONVERTERS.get(_without_none(kind))
            value = getattr(self, name, None)
            if convert is None or (value is None and kind != _without_none(kind)):
                continue
            change, wanted = convert
            try:
                setattr(self, name, change(value))
            except (TypeError, ValueError, KeyError, OverflowError):
                raise ConfigError(f"{name}={value!r}: give {wanted}") from None


def _without_none(kind: Any) -> Any:
    """Return the type `X` of `X | None`, and any other type unchanged."""
    kinds = [each for each in get_args(kind) if each is not NoneType]
    return kinds[0] if isinstance(kind, UnionType) and len(kinds) == 1 else kind


def whole_number(value: Any) -> int:
    """Return the value as an integer, as pydantic does. Raise TypeError or ValueError if it is not a whole number."""
    if not isinstance(value, str) and hasattr(value, "__index__"):
        return int(value)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _truth_value(value: Any) -> bool:
    return _TRUTH_VALUES[value.strip().lower() if isinstance(value, str) else value]


def _text(value: Any) -> str:
    return os.fsdecode(value)


def _numbers(value: Any) -> tuple[float, float]:
    if isinstance(value, str):
        raise TypeError
    first, second = value
    return float(first), float(second)


_TRUTH_VALUES: dict[Any, bool] = {
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False),
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
}

_CONVERTERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (whole_number, "a whole number"),
    float: (float, "a number"),
    bool: (_truth_value, "True or False"),
    str: (_text, "a string"),
    tuple[float, float]: (_numbers, "two numbers"),
}
"""For each type of fields that are converted, the function that converts, and what a message asks for."""


def _info(field: Field[Any]) -> FieldInfo:
    is_required = field.default is MISSING
    return FieldInfo(
        annotation=field.type,
        default=... if is_required else field.default,
        exclude=field.metadata.get("exclude"),
        description=field.metadata.get("description"),
        required=is_required,
    )


def _dump(value: Any) -> Any:
    return value.model_dump() if isinstance(value, HasModelFields) and is_dataclass(value) else value
