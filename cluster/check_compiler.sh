#!/usr/bin/env bash
# The compilers of `make cluster-check`, called as `c++` (CXX) or `nvcc` (PYTORCH_NVCC). One C++ file of Transformer
# Engine and one kernel of flash-attn are compiled by the flags of an installation. To save hours, the other C++ files
# are not optimized, and the other kernels are empty.
set -euo pipefail
real=(common.cpp flash_fwd_hdim128_bf16_sm80.cu)
arguments=() empty=$(dirname "$0")/empty.cu as_it_is=0
for argument; do
    for name in "${real[@]}"; do [[ $argument = */$name ]] && as_it_is=1; done
    [[ $argument = *.cu && $as_it_is = 0 ]] && argument=$empty
    arguments+=("$argument")
done
case $(basename "$0") in
nvcc)
    [[ -e $empty ]] || : >>"$empty"
    exec "${CUDA_HOME:?}/bin/nvcc" "${arguments[@]}"
    ;;
*)
    ((as_it_is)) || arguments+=(-O0)
    exec c++ "${arguments[@]}"
    ;;
esac
