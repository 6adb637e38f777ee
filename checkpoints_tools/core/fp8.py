"""Quantization to fp8 with block scales, and back, in numpy: bit-identical to transformers.

``quantized`` returns bytes and scales, ``dequantized`` the weights. A block of 128 x 128 weights w has the
scale s = amax / 448, where 448 is the largest number of float8_e4m3fn; it is stored as q = w / s, rounded to
nearest even, and read as q s. Both factors are float32, computed as transformers' ``Fp8Quantize`` does: f =
(1 / amax) 448, s = 1 / f, q = w f.

Shapes (suffix of a name): ``_RC`` rows and columns of a part of a matrix, ``_GB`` blocks that cover it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.fp8 import BLOCK

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_LARGEST = 448.0


def as_float32(data: memoryview, dtype: str) -> Floats:
    """Return the elements of ``data``, of type BF16, F16 or F32, as a new float32 array, without rounding."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def quantized(values_RC: Floats) -> tuple[Bytes, Floats]:
    """Return the bytes of q [R, C] and the scales [1, blocks] of at most 128 rows, one row of blocks.

    Overwrites ``values_RC``. A block of zeros, or of numbers below 1.4e-36, whose factor exceeds float32, has
    scale 1. Raises ValueError for a non-finite number, since its block has no scale.
    """
    columns = values_RC.shape[1]
    starts = np.arange(0, columns, BLOCK)
    with np.errstate(invalid="ignore"):
        largest_C = np.maximum(values_RC.max(0), -values_RC.min(0))  # abs() would copy the part
        amax_B = np.maximum.reduceat(largest_C, starts)
    if not np.isfinite(amax_B).all():
        raise ValueError("a number is not finite")
    with np.errstate(divide="ignore", over="ignore"):
        factor_B = np.float32(1.0) / amax_B * np.float32(_LARGEST)  # 448.0 / amax, as torch computes it
    factor_B[~np.isfinite(factor_B)] = 1.0
    values_RC *= np.repeat(factor_B, BLOCK)[:columns]
    scales_B: Floats = np.reciprocal(factor_B)
    return _rounded(values_RC), scales_B[None, :]


def _rounded(values_RC: Floats) -> Bytes:
    """Round to float8_e4m3fn, to nearest even, at most 448; overwrites ``values_RC``."""
    sign_RC = (values_RC.view(np.uint32) >> 24).astype(np.uint8) & 0x80
    np.abs(values_RC, out=values_RC)
    np.minimum(values_RC, np.float32(_LARGEST), out=values_RC)
    bits_RC = values_RC.view(np.uint32)
    is_small_RC = bits_RC < 0x3C800000  # 2^-6, the smallest number with a leading 1
    # 20 bits of the mantissa are dropped; the rest has its exponent 120 too high.
    magnitude_RC = ((bits_RC + (((bits_RC >> 20) & 1) + 0x7FFFF)) >> 20) - (120 << 3)
    if is_small_RC.any():
        # Multiples of 2^-9, the last bit of a float32 between 2^14 and 2^15.
        shifted = (values_RC[is_small_RC] + np.float32(2**14)).view(np.uint32)
        magnitude_RC[is_small_RC] = shifted - 0x46800000
    numbers_RC: Bytes = magnitude_RC.astype(np.uint8)
    numbers_RC |= sign_RC
    return numbers_RC


def dequantized(data: memoryview, columns: int, row: int, scales_GB: Floats) -> Floats:
    """Return the weights q s in float32, from bytes of q in rows from ``row`` on, ``columns`` wide.

    ``scales_GB``: scales of those rows' blocks, from the block of ``row`` on. Raises CheckpointError for a
    non-finite one.
    """
    if not np.isfinite(scales_GB).all():
        raise CheckpointError("its scales are not all finite: fetch the model again")
    values_RC = _numbers()[np.frombuffer(data, np.uint8)].reshape(-1, columns)
    begin = 0
    for scales_B in scales_GB:
        end = min(len(values_RC), (row // BLOCK + 1) * BLOCK - row + begin)
        with np.errstate(invalid="ignore"):
            values_RC[begin:end] *= np.repeat(scales_B, BLOCK)[:columns]
        row, begin = row + end - begin, end
    return values_RC


@cache
def _numbers() -> Floats:
    """Return each float8_e4m3fn byte's number: sign, exponent (4 bits, from -7), mantissa (3); 127: NaN."""
    exponents, mantissas = np.arange(128) >> 3, np.arange(128) & 7
    fractions = np.where(exponents > 0, 1.0, 0.0) + mantissas / 8
    positive = fractions * 2.0 ** (np.maximum(exponents, 1) - 7)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)
