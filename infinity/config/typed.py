"""What a small file holds, checked once, where it is read, against the types of a dataclass's fields.

[Note: typed records]
A checksum shows that a file is as somebody wrote it, and not who that was. So every record has a dataclass whose fields
say what they may hold, bounds included; what `parsed` returns needs no further look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from infinity.config.values import shown

Count: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 62)]
Positive: TypeAlias = Annotated[int, Field(gt=0, lt=1 << 62)]
Capacity: TypeAlias = Annotated[int, Field(ge=0, le=sys.maxsize)]  # the most stands for no limit
Real: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_Kind = TypeVar("_Kind")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def parsed(kind: type[_Kind], content: bytes | str) -> _Kind:
    """The dataclass that JSON holds; nothing is converted but lists to tuples, and strings to paths.

    Raises:
        ValueError: it is no JSON, or a field is missing, of another type or out of bounds; the message names the field.
    """
    try:
        found: _Kind = _adapter(kind).validate_json(content, strict=True)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"`{field}` is missing") from error
        value = "" if first["type"] == "json_invalid" else f" (it is {shown(first['input'])})"
        raise ValueError(f"`{field}`: {first['msg']}{value}" if field else first["msg"]) from error
