"""Layers that torch.compile cannot compile."""

import re

from titanlite.base.errors import ConfigError

_CODE = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)


def explain_uncompiled(error: BaseException) -> ConfigError | None:
    """Return what to do about a layer that torch cannot trace or generate code for; None for other errors."""
    if not any(kind.__module__.startswith(("torch._dynamo.", "torch._inductor.")) for kind in type(error).__mro__):
        return None
    text = str(error)
    message, _, code = text.partition("from user code:")
    reason = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    explanation = re.search(r"^\s*Explanation: (.*)$", message, re.MULTILINE)
    if explanation:
        reason = f"{reason.rstrip('.')}: {explanation[1]}"
    frames = list(_CODE.finditer(code))
    place = f" (in {frames[-1]['name']}, {frames[-1]['file']}:{frames[-1]['line']})" if frames else ""
    remedy = "Change that code" if frames else "See what it says"
    if "C++ compiler" in reason:
        remedy = "Install one (Debian and Ubuntu: apt install g++)"
    return ConfigError(
        f"compile.enable: torch cannot compile a layer: {reason.rstrip('.')}{place}. {remedy}, or set compile.enable = "
        "false."
    )
