"""YaRN, which stretches rotations to more positions than a model was first trained on: its fields, and their refusals.

transformers, Megatron-core and vLLM compute the frequencies alike. Where they read a field in different ways, the
value on which they differ is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lab.hf.families import Family, World
from lab.hf.kinds import MOST_POSITIONS, is_between, is_positive, wrong

NAMES = ("rope_scaling", "rope_parameters")
"""Fields that may hold the scaling: transformers 5 takes the first of them that is neither null nor empty."""
TYPES = {"rope_type", "type"}


@dataclass(frozen=True)
class Yarn:
    """The stretch by `factor` of rotations learnt on `original_positions` positions.

    Frequencies that turn at least `beta_fast` times within those stay, those of at most `beta_slow` turns are divided
    by the factor, with a ramp between whose ends are whole dimensions where `truncate`. Sines and cosines are
    multiplied by m(mscale) / m(mscale_all_dim), with m(x) = 0.1 x ln(factor) + 1, and by m(1) where both are None; the
    scores of latent attention by m(mscale_all_dim)^2.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def fields(self, rope_theta: float) -> dict[str, Any]:
        """The rotation as config.json states it."""
        stated = {
            "rope_type": "yarn",
            "rope_theta": rope_theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_positions,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
        }
        scales = {name: getattr(self, name) for name in ("mscale", "mscale_all_dim")}
        stated |= {name: value for name, value in scales.items() if value is not None}
        return stated if self.truncate else stated | {"truncate": False}


def stated_rope(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and value of the field that states the rotation; an empty one where none does."""
    return next(((name, fields[name]) for name in NAMES if fields.get(name)), (NAMES[0], {}))


def read_yarn(fields: dict[str, Any], family: Family, world: World | None) -> Yarn | None:
    """The file's YaRN, None for the default rotation; ValueError names the field that the world does not compute."""
    odd = [each for each in NAMES if not _is_default(fields.get(each))]
    if not odd:
        return None
    is_computed = family.has_yarn and world != "sandbox"
    for each in odd:
        kinds = [fields[each].get(key, "yarn") for key in TYPES] if isinstance(fields[each], dict) else []
        if not is_computed or kinds != ["yarn", "yarn"] or not TYPES & fields[each].keys():
            known = "default rotation or yarn" if is_computed else "default rotation"
            raise ValueError(f"{each}: expected the {known}, got {json.dumps(fields[each])}")
    name, rope = stated_rope(fields)
    if name not in odd:
        raise ValueError(f"{odd[0]}: expected the rotation of {name}, got {json.dumps(fields[odd[0]])}")
    yarn = _parsed(name, rope, family)
    for other in NAMES:
        if fields.get(other) and (other not in odd or _parsed(other, fields[other], family) != yarn):
            raise ValueError(f"{other}: expected the rotation of {name}, got {json.dumps(fields[other])}")
    _check_positions(name, yarn, fields)
    return yarn


def _is_default(rope: Any) -> bool:
    known = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    if rope is None:
        return True
    return isinstance(rope, dict) and all(name == "rope_theta" or known.get(name) == v for name, v in rope.items())


_ANY = (*TYPES, "rope_theta", "partial_rotary_factor", "attention_factor")
# Field, whether a file must state it, its kind in words, and the test. null is never a default here: vLLM fails on it,
# and transformers takes a null truncate for false.
_KINDS = (
    ("factor", True, "a number of at least 1", lambda v: is_positive(v) and v >= 1),
    (
        "original_max_position_embeddings", True, f"an integer of 1 to {MOST_POSITIONS:,}",
        lambda v: is_between(1, MOST_POSITIONS, v),
    ),
    ("beta_fast", False, "a positive number", lambda v: is_positive(v)),
    ("beta_slow", False, "a positive number", lambda v: is_positive(v)),
    ("mscale", False, "a positive number", lambda v: is_positive(v)),
    ("mscale_all_dim", False, "a number of at least 0", lambda v: is_positive(v) or (v == 0 and v is not False)),
    ("truncate", False, "true or false", lambda v: isinstance(v, bool)),
)  # fmt: skip


def _parsed(name: str, rope: dict[str, Any], family: Family) -> Yarn:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise wrong(f"{name}.partial_rotary_factor", "1.0 (heads are rotated whole)", rope["partial_rotary_factor"])
    if rope.get("attention_factor") is not None:
        why = "Megatron-core has none, and in latent attention vLLM scales otherwise; use mscale and mscale_all_dim"
        raise wrong(f"{name}.attention_factor", f"null ({why})", rope["attention_factor"])
    known = [key for key, *_ in _KINDS]
    for key in rope:
        if key not in (*_ANY, *known):
            raise wrong(f"{name}.{key}", f"none beside {', '.join(known)}", rope[key])
    for key, is_needed, kind, fits in _KINDS:
        if (key in rope or is_needed) and not fits(rope.get(key)):
            raise wrong(f"{name}.{key}", kind, rope.get(key))
    (_check_latent if family.is_latent else _check_grouped)(name, rope)
    given = {key: rope[key] for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if key in rope}
    unsaid = {"mscale": 1.0, "mscale_all_dim": 0.0} if family.is_latent else {}
    return Yarn(
        factor=float(rope["factor"]),
        original_positions=rope["original_max_position_embeddings"],
        truncate=rope.get("truncate", True),
        **{key: float(value) for key, value in (unsaid | given).items()},
    )


def _check_latent(name: str, rope: dict[str, Any]) -> None:
    if not rope.get("truncate", True):
        raise wrong(f"{name}.truncate", "true (the latent attention of Megatron-core and vLLM knows no other)", False)
    # transformers takes mscale for 1 wherever one of the two is absent or 0, the others the one that is there.
    if rope.get("mscale_all_dim") and "mscale" not in rope:
        raise wrong(f"{name}.mscale", "a number beside mscale_all_dim (transformers ignores one alone)", None)
    if not rope.get("mscale_all_dim") and rope.get("mscale", 1) != 1:
        raise wrong(f"{name}.mscale", "1 without mscale_all_dim (transformers ignores one alone)", rope["mscale"])


def _check_grouped(name: str, rope: dict[str, Any]) -> None:
    # Without both, transformers and vLLM take 1; with a 0 among them Megatron-core does not.
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")) or rope.get("mscale_all_dim") == 0:
        came = {key: rope.get(key) for key in ("mscale", "mscale_all_dim")}
        raise wrong(f"{name}.mscale", "a positive number beside a positive mscale_all_dim, or neither", came)


def _check_positions(name: str, yarn: Yarn, fields: dict[str, Any]) -> None:
    # Where the file states it outside the scaling, transformers takes that one.
    outside = fields.get("original_max_position_embeddings")
    if outside is not None and outside != yarn.original_positions:
        wanted = f"{yarn.original_positions}, that of {name}"
        raise wrong("original_max_position_embeddings", wanted, outside)
    positions, rows = fields.get("max_position_embeddings") or 4096, int(yarn.factor * yarn.original_positions)
    if positions > rows:
        why = "factor x original_max_position_embeddings, the length of vLLM's table"
        raise wrong("max_position_embeddings", f"at most {rows} ({why})", positions)


__all__ = ["Yarn", "read_yarn", "stated_rope"]
