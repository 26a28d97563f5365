#!/bin/sh
# Makes a virtual environment with Mooncake Store, to be measured beside kvpin: benchmarks/make_mooncake_venv.sh [DIR]
# Mooncake's wheel can't share one with the engines, and loads two RDMA libraries even where there's no RDMA.
set -eu

VERSION=0.3.13.post1
DIR=${1:-${KVPIN_VENVS:-.venvs}/mooncake-$VERSION}
PYTHON=${PYTHON:-python3}

fail() {
    echo "Mooncake can't be installed: $1" >&2
    echo "The benchmark runs without it: leave out --mooncake." >&2
    exit 1
}

"$PYTHON" -m venv "$DIR" || fail "no virtual environment in $DIR (on Debian: apt-get install python3-venv)"
"$DIR/bin/pip" install --quiet --disable-pip-version-check "mooncake-transfer-engine-non-cuda==$VERSION" numpy ||
    fail "pip found no wheel of mooncake-transfer-engine-non-cuda $VERSION for $("$PYTHON" --version) on $(uname -m)"
"$DIR/bin/python" -c "import mooncake.store" ||
    fail "its libraries don't load; on Debian: apt-get install libibverbs1 librdmacm1"
echo "$DIR"
