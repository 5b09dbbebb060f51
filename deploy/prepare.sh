# Sourced by ./run and ./test: packages and builds, each step said in one line.

PACKAGES="gcc cmake ninja-build pkg-config libuv1-dev libjansson-dev node-llhttp libpcre2-dev libutf8proc-dev libxxhash-dev libssl-dev libcmocka-dev"

# Ubuntu 22.04 packages no llhttp: its sources then come from the package of 24.04, which is for every machine.
LLHTTP_URL="http://archive.ubuntu.com/ubuntu/pool/universe/n/node-undici/node-llhttp_9.1.3~5.26.3+dfsg1+~cs23.10.12-2_all.deb"
LLHTTP_SHA256=344c5028544e0276656f46cbda5d3d03804684922bff4294cd95ea386d52b030

say() { printf '== %s\n' "$*" >&2; }
die() { printf '== %s\n' "$*" >&2; exit 1; }

# Unpacks llhttp's sources into build/llhttp, where build() finds them.
fetch_llhttp() {
    [ -e build/llhttp/usr/share/llhttp/llhttp.c ] && return 0
    say "fetching node-llhttp of Ubuntu 24.04"
    /usr/lib/apt/apt-helper download-file "$LLHTTP_URL" build/llhttp.deb "SHA256:$LLHTTP_SHA256" >"$LOG" 2>&1 ||
        die "could not fetch $LLHTTP_URL; see $LOG"
    dpkg-deb -x build/llhttp.deb build/llhttp
}

# Installs the named Debian packages that are missing, as root or with sudo.
install_packages() {
    local missing="" package
    for package in "$@"; do
        if [ "$package" = node-llhttp ] && [ "$ID-$VERSION_ID" = ubuntu-22.04 ]; then
            fetch_llhttp
            continue
        fi
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    local root=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "missing packages:$missing (run as root, install sudo, or install them yourself)"
        root=sudo
    fi
    say "installing packages (log: ${LOG#"$PWD/"}):$missing"
    # A list of packages may be missing or old: fetched once when the first try fails.
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q $missing >"$LOG" 2>&1 && return 0
    $root apt-get update -q >>"$LOG" 2>&1 || die "apt-get update failed; see $LOG"
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q $missing >>"$LOG" 2>&1 ||
        die "could not install:$missing; see $LOG"
}

# build FOLDER [cmake options]: configures once, then builds everything that changed. A terminal sees
# how far it is; others are told how long it takes, and where to look.
build() {
    local folder=$1 wait=""
    shift
    [ -t 1 ] || wait="; log: ${LOG#"$PWD/"}"
    [ -t 1 ] || [ -e "$folder/build.ninja" ] || wait=", the first time for a minute or two on two processors$wait"
    say "building in $folder$wait"
    [ ! -d build/llhttp ] || set -- "$@" -DCMAKE_PREFIX_PATH="$PWD/build/llhttp/usr"
    cmake -S . -B "$folder" -G Ninja "$@" >"$LOG" 2>&1 || { tail -n 30 "$LOG" >&2; die "cmake failed; see $LOG"; }
    if [ -t 1 ]; then
        cmake --build "$folder" || die "the build failed"
    else
        cmake --build "$folder" >"$LOG" 2>&1 || { tail -n 60 "$LOG" >&2; die "the build failed; see $LOG"; }
    fi
}

ID="" VERSION_ID=""
[ ! -e /etc/os-release ] || . /etc/os-release
mkdir -p build
LOG=$PWD/build/prepare.log
