"""The `verdict:` block: `lab.verdict.VerdictRules` as a config block, generated from it so that they agree."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import typing
from typing import TYPE_CHECKING, Any, cast

import pydantic

from lab.config.strict import Strict
from lab.verdict import VerdictRules


class _Rules(Strict):
    def rules(self) -> VerdictRules:
        """The thresholds as the verdict takes them; ValueError where one is out of range."""
        return VerdictRules(**self.model_dump())

    @pydantic.model_validator(mode="after")
    def _in_range(self) -> _Rules:
        self.rules()
        return self


def _fields() -> dict[str, Any]:
    """Each threshold's type, default and description, which is the string under it in the dataclass."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(VerdictRules)).body[0]).body
    described = {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    types = typing.get_type_hints(VerdictRules)
    return {
        field.name: (types[field.name], pydantic.Field(field.default, description=described.get(field.name)))
        for field in dataclasses.fields(VerdictRules)
    }


if TYPE_CHECKING:

    class VerdictBlock(_Rules):
        """The thresholds by which a run counts as collapsed."""

else:
    VerdictBlock = pydantic.create_model("VerdictBlock", __base__=_Rules, __module__=__name__, **_fields())
