"""Read fields of a `config.json`: single numbers, and the rotary embedding parameters.

Both spellings of rotary parameters are `transformers`': `rope_theta` and `rope_scaling` (old),
`rope_parameters` (since transformers 5). An invalid value raises a `ValueError` that names the
field.

See common/README.md#which-models"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from common.models.rotary import RopeParameters
from request import check_integers


def positive_int(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    values: dict[str, Any] = {name: default if fields.get(name) is None else fields[name]}
    check_integers(1, **values)
    return values[name]


def positive_float(fields: dict[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise refused(name, value, "be a number > 0")
    return float(value)


def refused(name: str, value: object, rule: str) -> ValueError:
    text = repr(value)
    shown = text if len(text) <= 200 else f"{text[:200]} ..."
    return ValueError(f"{name} must {rule}, got {shown}")


def read_ropes(
    fields: dict[str, Any], window_theta: float | None, max_positions: int
) -> tuple[RopeParameters, RopeParameters | None]:
    """Return the rotary parameters of layers without a window, and those of layers with a window if
    they use other angles. In that case `rope_parameters` holds an object for each kind, and
    `rope_scaling` applies to layers without a window."""
    if window_theta is None:
        return _rope(fields, max_positions), None
    kinds = fields.get("rope_parameters") or {}
    names = "full_attention", "sliding_attention"
    if not isinstance(kinds, dict) or not set(kinds) <= set(names):
        raise refused("rope_parameters", kinds, f"be an object of {' and '.join(names)}")
    others = {k: v for k, v in fields.items() if k != "original_max_position_embeddings"}
    full, sliding = (
        {**others, "rope_parameters": kinds.get(name), "rope_scaling": None} for name in names
    )
    if scaling := fields.get("rope_scaling"):
        rope = kinds.get(names[0]) or {}
        full["rope_scaling"] = {**rope, **scaling} if isinstance(scaling, dict) else scaling
    sliding["rope_theta"] = fields.get("rope_local_base_freq", window_theta)
    return _rope(full, max_positions), _rope(sliding, max_positions)


def _rope(fields: dict[str, Any], max_positions: int) -> RopeParameters:
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(source) or {}
    if not isinstance(rope, dict):
        raise refused(source, rope, "be an object or null")
    for holder in (fields, rope):
        if (share := holder.get("partial_rotary_factor")) not in (None, 1):
            raise refused("partial_rotary_factor", share, "be 1 or absent")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    values: dict[str, Any] = {}
    if rope_type != "default":
        read = resolve_name("common.models.rope_scaling:read_scaling")
        values = read(source, rope_type, rope, fields, max_positions)
    else:
        refuse_unknown(source, rope, set())
    theta = {"rope_theta": rope.get("rope_theta", fields.get("rope_theta"))}
    return RopeParameters(positive_float(theta, "rope_theta", 10_000.0), rope_type, **values)


def refuse_unknown(source: str, rope: dict[str, Any], type_fields: set[str]) -> None:
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {"original_max_position_embeddings", *type_fields}
    if unknown := sorted(set(rope) - known):
        raise refused(f"{source}: {unknown[0]}", rope[unknown[0]], "be absent (not supported)")
