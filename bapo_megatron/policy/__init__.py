"""megatron-core policy, ``megatron.MegatronPolicy``. Its import makes megatron-core usable without triton."""

from bapo_megatron.policy.megatron_versions import replace_triton_kernels

replace_triton_kernels()
