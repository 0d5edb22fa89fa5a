"""Gives dataclasses pydantic's `model_fields` and `model_dump()`, which code for InstructLab uses.

pydantic need not be installed.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar


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
    """The base of InstructLab's argument classes: it gives them pydantic's `model_fields` and `model_dump`."""

    model_fields: ClassVar[Any] = _ModelFields()

    def model_dump(self) -> dict[str, Any]:
        """Return the fields as a dict, except for those that are excluded by their metadata, such as `callbacks`."""
        given: Any = self
        kept = [each.name for each in fields(given) if not each.metadata.get("exclude")]
        return {name: _dumped(getattr(self, name)) for name in kept}


def _info(field: Field[Any]) -> FieldInfo:
    is_required = field.default is MISSING
    return FieldInfo(
        annotation=field.type,
        default=... if is_required else field.default,
        exclude=field.metadata.get("exclude"),
        description=field.metadata.get("description"),
        required=is_required,
    )


def _dumped(value: Any) -> Any:
    return value.model_dump() if isinstance(value, HasModelFields) and is_dataclass(value) else value
