"""The megatron-core policy, ``megatron.MegatronPolicy``. Its modules import torch and megatron-core."""

from bapo_megatron.policy.megatron_versions import compile_on_gpus_only, replace_triton_kernels

compile_on_gpus_only()
replace_triton_kernels()
