#!/bin/sh
# Leaves .tools/uv: uv with a Python 3.12 chosen. Takes both from the machine where it has them, uv from PyPI and
# Python through uv where it has not. Does nothing when .tools/uv already works. Needs no rights outside this folder.
set -eu
cd "$(dirname "$0")"

say() { echo "bootstrap: $*" >&2; }

# A command that exists may still be a shim that answers "not installed": only one that runs and says 3.12 counts.
is_python312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
    for candidate in "${UV_PYTHON:-}" python3.12 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 /opt/python/*3.12*/bin/python3.12; do
        if [ -n "$candidate" ] && is_python312 "$candidate"; then
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return
        fi
    done
}

# Older releases than 0.8 cannot read the lock files.
is_uv() {
    version=$("$1" --version 2>/dev/null | sed -n 's/^uv \([0-9.]*\).*/\1/p')
    [ -n "$version" ] && [ "$(printf '%s\n0.8.0\n' "$version" | sort -V | head -n 1)" = 0.8.0 ]
}

find_uv() {
    for candidate in uv .tools/pypi/bin/uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        if is_uv "$path"; then
            realpath "$path"
            return
        fi
    done
}

install_uv() {
    for candidate in "$1" python3 python; do
        [ -n "$candidate" ] && "$candidate" -m pip --version >/dev/null 2>&1 || continue
        "$candidate" -m pip install --quiet --disable-pip-version-check --upgrade --target .tools/pypi 'uv>=0.8' >&2 && return
    done
    for candidate in "$1" python3 python; do
        [ -n "$candidate" ] && "$candidate" -m venv .tools/pypi >/dev/null 2>&1 || continue
        .tools/pypi/bin/python -m pip install --quiet 'uv>=0.8' >&2 && return
    done
    say "no uv on this machine and no Python with pip or venv to install it: see https://docs.astral.sh/uv"
    exit 1
}

if [ -x .tools/uv ] && .tools/uv python find --no-project >/dev/null 2>&1; then
    exit 0
fi
mkdir -p .tools
python=$(find_python)
uv=$(find_uv)
if [ -z "$uv" ]; then
    say "installing uv from PyPI into .tools/pypi"
    install_uv "$python"
    uv=$(find_uv)
fi
say "uv: $uv ($("$uv" --version))"
if [ -z "$python" ]; then
    python=$("$uv" python find --no-project 3.12 2>/dev/null || true)
fi
if [ -z "$python" ]; then
    say "no Python 3.12 on PATH or among pyenv's versions: uv fetches one"
    "$uv" python install 3.12 >&2
    python=$("$uv" python find --no-project 3.12)
fi
say "Python: $python ($("$python" --version))"

# uv brings its own certificates; behind a proxy that re-signs, only the machine's know the issuer.
certificates=
for bundle in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ -z "$certificates" ] && [ -r "$bundle" ] && certificates="SSL_CERT_FILE=\${SSL_CERT_FILE:-$bundle}"
done

cat >.tools/uv.new <<END
#!/bin/sh
UV_PYTHON='$python' UV_HTTP_TIMEOUT=\${UV_HTTP_TIMEOUT:-300} $certificates exec '$uv' "\$@"
END
chmod +x .tools/uv.new
mv .tools/uv.new .tools/uv
