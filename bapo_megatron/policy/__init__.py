"""The megatron-core policy, ``megatron.MegatronPolicy``. Its modules import torch and megatron-core."""

from bapo_megatron.policy.megatron_versions import replace_triton_kernels

replace_triton_kernels()
