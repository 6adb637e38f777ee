#!/usr/bin/env bash
# Build of the container image (cluster/Dockerfile) as a squashfs file for enroot and pyxis: `make image [IMAGE=FILE]`.
# Needs docker or podman to build it, and enroot to write the file. Without enroot the image stays in the builder's
# store, and the commands that convert it elsewhere are printed, for enroot and for apptainer.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${IMAGE:-bapo-megatron.sqsh}
tag=bapo-megatron:$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' bapo_megatron/__init__.py)

builder=
for name in docker podman; do
    if command -v "$name" >/dev/null; then builder=$name; break; fi
done
if [[ -z $builder ]]; then
    echo "error: make image needs docker or podman; without either, make cluster installs without a container" >&2
    exit 2
fi
if [[ -e $image ]]; then
    echo "error: $image exists: remove it, or name another file with IMAGE=FILE" >&2
    exit 2
fi
jobs=()
if [[ -n ${MAX_JOBS:-} ]]; then jobs=(--build-arg "MAX_JOBS=$MAX_JOBS"); fi
# BuildKit keeps what is downloaded and compiled between tries; podman always does.
DOCKER_BUILDKIT=1 "$builder" build -f cluster/Dockerfile --build-arg "CLUSTER_ARCH=${CLUSTER_ARCH:-9.0}" "${jobs[@]}" -t "$tag" .
scheme=dockerd
if [[ $builder = podman ]]; then scheme=podman; fi
if command -v enroot >/dev/null; then
    enroot import -o "$image" "$scheme://$tag"
    echo "$image is the image: name it as container in the cluster file (slurm/clusters/h100_pyxis.toml)"
else
    echo "$tag is built, and enroot is not installed here. Where it is, after $builder save and load:"
    echo "  enroot import -o $image $scheme://$tag"
    echo "  apptainer build ${image%.sqsh}.sif docker-daemon://$tag      # without pyxis"
fi
