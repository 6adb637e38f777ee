"""Cast to bfloat16, rounded to nearest even, bit for bit as torch does (a NaN has one bit pattern).

``copying.py`` calls it where a conversion changes the type of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NAN = 0x7FC0  # torch's kernels make 0x7FC0 or 0xFFFF of every NaN, by the machine


def to_bfloat16(data: memoryview, dtype: str) -> memoryview:
    """The values of ``data``, of type F32 or F16, as BF16: to nearest, ties to even, NaN to 0x7FC0.

    A float16 becomes a float32 first, which loses nothing.
    """
    import numpy as np  # a conversion that keeps its type starts without it

    if dtype == "F16":
        with np.errstate(invalid="ignore"):
            bits = np.frombuffer(data, np.float16).astype(np.float32).view(np.uint32)
    elif dtype == "F32":
        bits = np.frombuffer(data, np.uint32)
    else:
        raise ValueError(f"{dtype} is not converted to BF16")
    return _rounded(bits).data.cast("B")


def _rounded(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    import numpy as np

    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint32(_NAN), nearest).astype(np.uint16)
