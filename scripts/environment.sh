# Sourced by scripts/first-run and scripts/test, in the root of the checkout: makes .venv on the first call, or takes the
# environment of KVBRIDGE_PYTHON=/path/to/python, and installs the checkout there as a wheel.

# Without safe-path a Python started here would import the checkout's kvbridge/ and kernels/.
export PYTHONSAFEPATH=1
unset PYTHONPATH

python="${KVBRIDGE_PYTHON:-.venv/bin/python}"
if [[ -z "${KVBRIDGE_PYTHON:-}" && ! -x "$python" ]]; then
    echo "== making .venv (takes minutes once)"
    "${PYTHON:-python3}" -m venv .venv
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "kvbridge needs Python 3.11 or newer, found $("$python" --version); set PYTHON=/path/to/python3.11" >&2
    exit 2
}
pip=("$python" -m pip --disable-pip-version-check -qq)
bin="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"

# install_wheel EXTRAS: builds the wheel and installs it, with extras such as [dev], into the environment.
install_wheel() {
    "$python" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null ||
        "${pip[@]}" install torch==2.13.0
    "${pip[@]}" install 'setuptools>=77'
    # setuptools never deletes from build/lib, so a module that is gone would stay in the wheel.
    rm -rf build
    "${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir build/dist .
    local wheel
    wheel="$(echo build/dist/kvbridge-*.whl)"
    "${pip[@]}" install "$wheel$1"
    "${pip[@]}" install --force-reinstall --no-deps "$wheel"
}
