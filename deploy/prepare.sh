# Sourced by ./run and ./test: packages and builds, each step said in one line.

PACKAGES="gcc cmake ninja-build pkg-config libuv1-dev libjansson-dev node-llhttp libpcre2-dev libutf8proc-dev libxxhash-dev libssl-dev libcmocka-dev"

say() { printf '== %s\n' "$*" >&2; }
die() { printf '== %s\n' "$*" >&2; exit 1; }

# Installs the named Debian packages that are missing, as root or with sudo.
install_packages() {
    local missing="" package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    local root=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "missing packages:$missing (run as root, install sudo, or install them yourself)"
        root=sudo
    fi
    say "installing packages:$missing"
    # A list of packages may be missing or old: fetched once when the first try fails.
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q $missing >"$LOG" 2>&1 && return 0
    $root apt-get update -q >>"$LOG" 2>&1 || die "apt-get update failed; see $LOG"
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q $missing >>"$LOG" 2>&1 ||
        die "could not install:$missing; see $LOG"
}

# build FOLDER [cmake options]: configures once, then builds everything that changed.
build() {
    local folder=$1
    shift
    say "building in $folder"
    cmake -S . -B "$folder" -G Ninja "$@" >"$LOG" 2>&1 || { tail -n 30 "$LOG" >&2; die "cmake failed; see $LOG"; }
    cmake --build "$folder" >"$LOG" 2>&1 || { tail -n 60 "$LOG" >&2; die "the build failed; see $LOG"; }
}

mkdir -p build
LOG=$PWD/build/prepare.log
