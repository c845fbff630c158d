"""An engine defect of the sandbox in a few words, from its block of the config: its kind and the dials that act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lab.report.style import number


def defect_words(defect: Mapping[str, Any]) -> str:
    """For example `weight precision fp8_e4m3 block 128`; an unknown kind is named with all its values."""
    kind = str(defect.get("kind"))
    words = WORDS.get(kind, _values)(defect)
    return f"{kind.replace('_', ' ')} {words}".strip()


def _values(defect: Mapping[str, Any]) -> str:
    return " ".join(_text(value) for key, value in defect.items() if key != "kind")


def _precision(defect: Mapping[str, Any]) -> str:
    words = [str(defect.get("format"))]
    if words[0] not in ("bf16", "fp16") and "scale" in defect:
        words.append(str(defect["scale"]))
        if defect["scale"] == "block":
            words.append(_text(defect.get("block_size")))
    return " ".join(words)


def _reduction(defect: Mapping[str, Any]) -> str:
    return f"{_text(defect.get('units'))} units, {defect.get('partials')} partial sums"


def _stale(defect: Mapping[str, Any]) -> str:
    words = f"by {_text(defect.get('versions'))}"
    share = defect.get("switch_at", 1.0)
    return words if share == 1 else f"{words}, newest from {_text(share)} on, cache {defect.get('cache')}"


def _sampling(defect: Mapping[str, Any]) -> str:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    acting = [f"{name} {_text(defect[name])}" for name, value in neutral.items() if defect.get(name, value) != value]
    return ", ".join([*acting, f"{defect.get('score')} scores"])


def _text(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "weight_precision": _precision,
    "activation_precision": _precision,
    "kv_precision": _precision,
    "reduction_order": _reduction,
    "stale_weights": _stale,
    "sampling_mismatch": _sampling,
}
