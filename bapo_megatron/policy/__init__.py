"""The megatron-core policy. Its modules import their dependencies at import time."""

from bapo_megatron.policy.megatron_versions import replace_triton_kernels

replace_triton_kernels()
