"""The policy on megatron-core. Its modules import what they use of it when they are imported themselves."""

from bapo_megatron.policy.megatron_versions import replace_triton_kernels

replace_triton_kernels()
