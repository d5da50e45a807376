"""Parse small JSON files into dataclasses, and check the types and bounds of all fields.

[Note: typed records]
A checksum shows that a file was not damaged, but not that its writer can be trusted. So every record has a dataclass
whose field types include the bounds. A result of `parsed` needs no further checks.
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
Capacity: TypeAlias = Annotated[int, Field(ge=0, le=sys.maxsize)]  # `sys.maxsize` stands for no limit
Real: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_Kind = TypeVar("_Kind")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def parsed(kind: type[_Kind], content: bytes | str) -> _Kind:
    """Return the dataclass of a JSON text. Only lists are converted, to tuples, and strings, to paths.

    Raises:
        ValueError: the text is no JSON, or a field is missing, of another type or out of bounds. The message names it.
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
