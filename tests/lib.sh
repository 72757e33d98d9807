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
