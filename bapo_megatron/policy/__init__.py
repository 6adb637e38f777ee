"""The megatron-core policy, ``megatron.MegatronPolicy``. Importing these modules imports torch and
megatron-core.
"""

from bapo_megatron.policy.megatron_versions import replace_triton_kernels

replace_triton_kernels()
