#!/usr/bin/env bash
# Installs one of a cluster's two environments, or continues where an earlier try failed. `make cluster` and the
# Dockerfile call it:
#
#   bash cluster/install.sh trainer VENV
#   bash cluster/install.sh sglang VENV
#   bash cluster/install.sh flash_attn_wheel VENV   # compiles it by the trainer's environment, and installs nothing
#
# Needs the compiler nvcc of CUDA 13 for the trainer's, and neither a GPU, nor headers of cuDNN and NCCL, nor a
# network but the package index. What is compiled is kept as wheels, by torch, Python and architecture, so it is
# compiled once. Variables:
#
#   PYTHON           interpreter for a new environment (python3)
#   CLUSTER_ARCH     compute capability of the GPUs; 8.x: flash-attn, too
#   CLUSTER_WHEELS   folder of the wheels (.wheels)
#   CUDA_HOME        CUDA's toolkit; by default that of nvcc in PATH
#   MAX_JOBS         compilers at a time; by default as many as fit into cores and memory
set -euo pipefail
kind=$1 venv=$2
cd "$(dirname "$0")/.."
pins=bapo_megatron/constraints.txt
wheels=$(realpath -m "${CLUSTER_WHEELS:-.wheels}")
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "error: $*" >&2
    exit 2
}

pinned() { # FILE NAME...: the versions that a file pins for the environment's Python, as NAME==VERSION
    local file=$1 name
    shift
    for name; do grep "^$name==" "$file"; done | "$venv/bin/python" -c '
import sys
from pip._vendor.packaging.requirements import Requirement
for line in map(Requirement, sys.stdin.read().splitlines()):
    if line.marker is None or line.marker.evaluate():
        print(f"{line.name}{line.specifier}")'
}

# A step's line is the last of its output: what it took, and what the environment takes.
step() {
    local begun=$SECONDS
    "$@"
    echo "cluster/install.sh: $((SECONDS - begun)) s, environment of $(du -sm "$venv" | cut -f1) MB: $*"
}

pip() { "$venv/bin/python" -m pip "$@"; }

make_environment() {
    # One whose making was cut off has a Python, and no pip.
    { [[ -x $venv/bin/python ]] && pip --version >/dev/null 2>&1; } || "${PYTHON:-python3}" -m venv "$venv"
    pip install "$(pinned cluster/build.txt pip)"
}

# The toolkit's folder, which nvcc itself names: one in PATH may be a link or a script, with no headers beside it.
find_cuda() {
    if [[ -z ${CUDA_HOME:-} ]]; then
        local nvcc
        nvcc=$(PATH="$PATH:/usr/local/cuda/bin" type -P nvcc) ||
            fail "no nvcc of CUDA 13 in PATH: load CUDA's module, or set CUDA_HOME to its folder"
        CUDA_HOME=$(realpath "$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')")
    fi
    export CUDA_HOME
    "$CUDA_HOME/bin/nvcc" --version 2>/dev/null | grep -q 'release 13\.' ||
        fail "CUDA_HOME=$CUDA_HOME has no nvcc of CUDA 13, for which torch's wheels are built: load its module, or set CUDA_HOME"
}

# GB of memory that this process may take: the machine's free ones, or the least limit of its control groups.
free_gb() {
    local least path limit version
    least=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
    for version in 1 2; do
        case $version in
        1) path=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup) ;;
        2) path=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup) ;;
        esac
        while [[ $path != /sys/fs ]]; do
            limit=$(cat "$path/memory.max" 2>/dev/null || cat "$path/memory.limit_in_bytes" 2>/dev/null || echo max)
            if [[ $limit != max ]] && ((limit >> 30 < least)); then least=$((limit >> 30)); fi
            path=${path%/*}
        done
    done
    echo "$least"
}

jobs_of() { # GB: how many compilers that take so much run at a time
    local cores memory
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) memory=$(($(free_gb) / $1))
    echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

# The wheel of a package that comes as source, in the folder $built. Sources and objects of a try that failed stay
# beside it, so the next one compiles what is left.
build_wheel() { # REQUIREMENT GB FOLDER
    local name=${1%%==*} version=${1##*==} folder=$wheels/$3 source jobs
    built=$folder
    # Two installations must not compile in one folder: the second waits, and takes the first one's wheel.
    mkdir -p "$folder"
    exec 9>>"$folder/lock"
    flock 9 || echo "cluster/install.sh: $folder cannot be locked: no other installation may use it now" >&2
    if compgen -G "$folder/${name//-/_}-${version}[-+]*.whl" >/dev/null; then
        exec 9>&-
        return
    fi
    find_cuda
    local packages
    packages=$(realpath "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')")
    # CUDA's libraries, cuDNN and NCCL: headers of torch's wheels, behind the toolkit's own. Transformer Engine takes
    # them by a variable from 2.12 on; 2.11 and flash-attn do not.
    local headers=$packages/nvidia/cu13/include:$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include
    export CPATH=$headers${CPATH:+:$CPATH} PATH=$(realpath "$venv/bin"):$PATH
    jobs=${MAX_JOBS:-$(jobs_of "$2")} # of this package alone: the next one's compilers take more
    # Else they ask a download server for a wheel, without a time limit.
    export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE
    echo "cluster/install.sh: $1 is compiled by $CUDA_HOME, $jobs at a time"
    source=$folder/source-$name-$version
    if [[ ! -d $source ]]; then
        rm -rf "$source.part"
        mkdir -p "$source.part"
        pip download --no-deps --no-build-isolation --no-binary :all: --dest "$source.part" "$1"
        tar -xzf "$source.part"/*.tar.gz -C "$source.part" --strip-components 1
        rm "$source.part"/*.tar.gz
        mv "$source.part" "$source"
    fi
    MAX_JOBS=$jobs pip wheel --no-deps --no-build-isolation --wheel-dir "$folder/part" "$source" 9>&-
    mv "$folder"/part/*.whl "$folder"
    rm -rf "$folder/part" "$source"
    exec 9>&-
}

# The folder of wheels for the trainer's torch and Python.
folder_of_torch() {
    echo "torch-$(pinned "$pins" torch | cut -d = -f 3)-$("$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
}

flash_attn_wheel() {
    export FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS:-80} # its kernels run on 8.6 and 8.9, too
    build_wheel "$(pinned cluster/flash_attn.txt flash-attn)" 9 "$(folder_of_torch)-sm${FLASH_ATTN_CUDA_ARCHS//;/-}"
}

# Extensions are compiled against torch, so without isolation, behind it. NCCL comes last, over the version that torch
# names.
trainer() {
    step make_environment
    step pip install -c "$pins" -r cluster/build.txt "$(pinned "$pins" torch)"
    "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.version.cuda)' ||
        fail "pip has installed a torch without CUDA: its index or find-links (\`pip config list\`, PIP_...) name another build"
    step pip install --no-deps "$(pinned "$pins" megatron-core)"
    step build_wheel "$(pinned cluster/trainer.txt transformer-engine-torch)" 2 "$(folder_of_torch)"
    step pip install --find-links "$built" -c "$pins" -r cluster/trainer.txt -e ".[cluster]"
    mapfile -t tasks < <(pinned "$pins" reasoning-gym champ-dataset)
    step pip install --no-deps "${tasks[@]}"
    if [[ ${CLUSTER_ARCH:-} = 8.* ]]; then
        step flash_attn_wheel
        step pip install --no-deps --find-links "$built" -r cluster/flash_attn.txt
    fi
    step pip install --no-deps -r cluster/nccl.txt
}

sglang() {
    step make_environment
    step pip install -r cluster/sglang.txt
    step pip install --no-deps -r cluster/nccl.txt
}

case $kind in trainer | sglang | flash_attn_wheel) "$kind" ;; *) fail "$kind: trainer, sglang or flash_attn_wheel" ;; esac
