"""Config fields that follow from theory's dataclasses: their types, defaults, descriptions and ranges.

A block that inherits `Derived` and a dataclass has the dataclass's fields and checks; `derived` gives a single field.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import annotated_types
from pydantic import Field, model_validator

from lab.strict import Strict
from theory.fields import About, about

_BOUNDS = {"gt": annotated_types.Gt, "ge": annotated_types.Ge, "lt": annotated_types.Lt, "le": annotated_types.Le}


class Derived(Strict):
    """A block whose inherited fields have their descriptions and ranges in `About`.

    Every `Strict` block is frozen at run time; pyright cannot see that, and reports the frozen dataclass beside it.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            # A list of them first, because the loop adds to the metadata.
            for words in [word for word in field.metadata if isinstance(word, About)]:
                field.description = words.words
                field.metadata += [_BOUNDS[name](bound) for name, bound in words.bounds.items()]
        # pydantic has built the validators from the fields as they were before.
        cls.model_rebuild(force=True)

    @model_validator(mode="after")
    def _as_the_theory_checks(self) -> Derived:
        # pydantic makes the instance without the dataclass's __init__, so nothing else runs its checks.
        checks = getattr(self, "__post_init__", None)
        if checks is not None:
            checks()
        return self


def derived(cls: type, name: str, **changes: Any) -> Any:
    """The field `name` of this dataclass, with its default, description and range; `changes` replace any of them."""
    words = about(cls)[name]
    default = next(field.default for field in fields(cls) if field.name == name)
    settings: dict[str, Any] = {"default": default, "description": words.words, **words.bounds, **changes}
    return Field(**settings)
