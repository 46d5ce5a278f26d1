"""Architectures that are not served, and why: the first line whose pattern fits.

What is not named here, nor in the families of `model_config.py`, is refused, too, but without a
reason: nobody here has looked at it. A family that is added there wins over a pattern here."""

from __future__ import annotations

from fnmatch import fnmatchcase

_STATES = "three of four layers keep a state in the place of keys and values"
WHY_REFUSED: dict[str, str] = {
    "GptOssForCausalLM": "its attention has a sink in each head, and its experts are in MXFP4",
    "Qwen3Next*": _STATES,
    "Qwen3_5*": _STATES,
    "*Mamba*": "its layers, or most, keep a state in the place of keys and values",
    "DeepseekV[23]*": "its keys and values are compressed (MLA), and experts come in groups",
    "Gemma2ForCausalLM": "scores and logits are capped (attn_logit_softcapping)",
    "Olmo2ForCausalLM": "nobody here has compared it with anything; OLMo 3 is served",
    "*ForConditionalGeneration": "it reads pictures or sound, or has an encoder, too",
    "*ForMaskedLM": "it is an encoder, which has no next token",
    "*For*Classification": "it classifies, and has no next token",
    "*Model": "it has no head, so no next token",
}


def why_refused(architectures: object) -> str | None:
    """None: not known. `architectures` is what a `config.json` says."""
    given = architectures if isinstance(architectures, list) else []
    names = [n for n in given if isinstance(n, str) and not fnmatchcase(n, "*Head*Model")]
    for pattern, why in WHY_REFUSED.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return why
    return None
