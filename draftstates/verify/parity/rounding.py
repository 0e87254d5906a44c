"""What a capture's engine arguments and checkpoint do to the precision of its numbers."""

import dataclasses

from draftstates.engine import flags
from draftstates.spec import CaptureSpec

_QUANTISING = ("--quantization", "--torchao-config", "--kv-cache-dtype", "--modelopt-quant")
# Values that leave numbers as `capture.compute_dtype` says.
_PLAIN = {"auto", "none", "bf16", "bfloat16", "half", "float16", "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerRounding:
    """What a server rounds numbers to, below its computing format.

    Attributes:
        eight_bits: numbers have 8 bits: the method that says so; None where none has.
        coarser: a method of fewer bits, or of an unknown number, that the checkpoint does not say.
    """

    eight_bits: str | None = None
    coarser: str | None = None

    @classmethod
    def of(cls, spec: CaptureSpec) -> "ServerRounding":
        """Return what a capture's numbers are rounded to.

        The weights of a quantised checkpoint are dequantised for the comparison; a server of FP8
        rounds what it multiplies them with, too.
        """
        own = spec.quantization or ""
        eight, coarser = own if "fp8" in own else None, None
        for name, values in flags.split(spec.engine_args):
            # SGLang accepts abbreviated flags.
            if not any(known.startswith(name) for known in _QUANTISING):
                continue
            value = values[0].lower() if values else ""
            if value in _PLAIN or value == own:
                continue
            if _has_eight_bits(value):
                eight = eight or f"{name} {value}"
            else:
                coarser = f"{name} {value}"
        return cls(eight_bits=eight, coarser=coarser)


def _has_eight_bits(method: str) -> bool:
    if any(part in method for part in ("4", "awq", "gptq", "mx")):
        # The 4 of a format's name, such as e4m3, is none of its bits.
        return method in ("fp8_e4m3", "fp8_e5m2", "mxfp8")
    return "fp8" in method or "int8" in method
