# tests/lib.sh - what tests/run and .ci/run share; sourced by bash after deploy/lib.sh.

# kv_build_in FOLDER MESON_OPTION...: builds in a folder of its own. Options hold for an existing
# folder too.
kv_build_in() {
    local folder=$1
    shift
    if [[ -f $folder/build.ninja ]]; then
        "$KV_VENV/bin/meson" configure "$folder" "$@" || return 1
    else
        "$KV_VENV/bin/meson" setup "$folder" "$@" || return 1
    fi
    NINJA_STATUS='[%f/%t] ' "$KV_VENV/bin/ninja" -C "$folder" | grep -v '^\[.*\] \(Compiling\|Generating\|Linking\)'
    return "${PIPESTATUS[0]}"
}

KV_CUDA=$KV_ROOT/.cache/cuda/nvidia/cu13

# kv_cuda_fetch FOLDER REQUIREMENT...: packages of CUDA's toolkit from PyPI, unpacked in .cache/FOLDER.
kv_cuda_fetch() {
    local folder=$KV_ROOT/.cache/$1
    shift
    [[ ! -d $folder ]] || return 0
    kv_say "fetching from PyPI: $*"
    rm -rf "$folder.part"
    "$KV_VENV/bin/pip" install -q --no-deps --target "$folder.part" "$@" || return 1
    mv "$folder.part" "$folder"
}

# kv_nvcc: puts an nvcc on PATH. Where the machine has none: the least of the toolkit that compiles
# and links the kernels (101 MB to fetch, 253 MB unpacked; 6 seconds where it was tried). It also
# needs g++.
kv_nvcc() {
    ! command -v nvcc >/dev/null || return 0
    if [[ -x /usr/local/cuda/bin/nvcc ]]; then
        export PATH=/usr/local/cuda/bin:$PATH
        return 0
    fi
    kv_cuda_fetch cuda nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-cuda-runtime==13.0.96 || return 1
    ln -sfn lib "$KV_CUDA/lib64" # where nvcc looks for cudart
    export PATH=$KV_CUDA/bin:$PATH
}

# kv_cuda_tools: what reads machine code, for tests/gpu/ladder (2 MB to fetch, 6 MB unpacked). PyPI has
# none of 13.0; these read what it makes.
kv_cuda_tools() {
    kv_cuda_fetch cuda-tools nvidia-cuda-cuobjdump==13.2.86 nvidia-cuda-nvdisasm==13.2.86
}
