"""DeepSpeed's base class of configuration sections: a pydantic model that drops "auto" and renames deprecated keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from infinity.integrations.deepspeed.misuse import AssertedConfigError


class DeepSpeedConfigModel(BaseModel):
    """A section whose unknown keys are errors.

    The value of a field with `json_schema_extra={"deprecated": True, "new_param": name}` is set for the field of that
    name, converted by `new_param_fn` if given, unless `set_new_param` is false.

    Args:
        strict: accept "auto" as a value. By default, keys with "auto" get their defaults.

    Raises:
        AssertedConfigError: a deprecated name is given together with the one that has replaced it.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {key: value for key, value in data.items() if strict or not isinstance(value, str) or value != "auto"}
        super().__init__(**_renamed(type(self), given))


def _renamed(section: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with deprecated names replaced by the new ones."""
    values = dict(given)
    for old, field in section.model_fields.items():
        facts = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        new: Any = facts.get("new_param")
        if old not in values or not facts.get("deprecated") or not new or not facts.get("set_new_param", True):
            continue
        value = values.pop(old)
        if {new, section.model_fields[new].alias} & values.keys():
            raise AssertedConfigError(f"{section.__name__}: {old} is deprecated, and {new} is given, too; give {new}")
        convert: Any = facts.get("new_param_fn")
        values[new] = value if convert is None else convert(value)
    return values
