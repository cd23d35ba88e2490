#!/usr/bin/env bash
# One run as a job of a Ray cluster that is up already, submitted in the project's folder, which all nodes must see:
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 configs/jobs/ray_job.sh CONFIG.yaml trainer.nnodes=2 \
#       trainer.n_gpus_per_node=8 key=value ...
#
# It needs `ray[default]` here and on the head, and the cluster's token, if it has one (RAY_AUTH_MODE=token and
# RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token). It prints the job's id and what the run says; Ctrl-C ends the looking on
# alone. `ray job stop ID` has the run save and leave; submitted again, it goes on. See docs/cluster.md.
set -euo pipefail

PATH="$(realpath "${VENV:-.venv}")/bin:$PATH"
# The head, where the run's driver stands, needs no GPU. `exec`: the signal of a stop reaches the run itself.
printf -v words ' %q' "$@" ray_kwargs.ray_init.address=auto
run="cd $(printf %q "$PWD") && exec $(printf %q "$(command -v python)") main.py$words"
# Ray gives a job that is stopped 3 s, unless told otherwise: a step must end and a checkpoint be written.
ray job submit --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "'"${STOP_WAIT_S:-600}"'"}}' \
    -- bash -c "$run"
