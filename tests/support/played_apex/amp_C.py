"""The compiled part of apex. Transformer Engine took its kernels over lists of tensors from here, with
their arguments, so the stand-ins for those serve."""

from bapo_rehearsal.transformer_engine.layers import (
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"]
