# Sourced by scripts that need more than pip can install. Root on Debian gets what is missing; everybody else is told
# its package's name.

need() { # the package, what it is for, and a command that succeeds where it is there
    package=$1 purpose=$2
    shift 2
    "$@" >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing $purpose: $package."
        # Several packages may stand in one argument.
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $package >/dev/null
        "$@" >/dev/null 2>&1 && return
    fi
    echo "Missing: $purpose. Please install it (Debian, Ubuntu: sudo apt-get install $package)." >&2
    return 1
}
