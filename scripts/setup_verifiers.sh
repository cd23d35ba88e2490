#!/usr/bin/env bash
# Makes verifiers' own virtual environment $2 with the uv of $1: its packages exclude those of vLLM.
set -euo pipefail
uv=$1/bin/uv
venv=$2
. "$(dirname "$0")/uv_of_pip.sh"
[ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "${PYTHON:-python3}" "$venv"
# With bytecode a start takes half as long.
"$uv" pip install --python "$venv/bin/python" --compile-bytecode -r requirements-verifiers.txt
