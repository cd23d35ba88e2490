"""The job files of configs/jobs.

Scripts that bash can read, keys that exist, and a manifest of KubeRay's form.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.conftest import PROJECT
from training.config.loader import load_config

JOBS = PROJECT / "configs/jobs"
SCRIPTS = sorted(path for path in JOBS.iterdir() if path.suffix in (".sh", ".sbatch"))
OVERRIDE = re.compile(r"(?:trainer|data|actor_rollout_ref|ray_kwargs)\.[\w.]+=")


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of an object that has these fields only."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
# As the Kubernetes API writes amounts: 500m, 64Gi, "8".
QUANTITY = {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?(m|k|[KMGT]i?|)$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = closed(
    ["name", "image"],
    name=TEXT,
    image=TEXT,
    env=many(closed(["name", "value"], name=TEXT, value=TEXT)),
    resources=closed([], limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=many(closed(["name", "mountPath"], name=TEXT, mountPath=TEXT)),
)
VOLUME = closed(
    ["name"],
    name=TEXT,
    persistentVolumeClaim=closed(["claimName"], claimName=TEXT),
    emptyDir=closed([], medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = closed(
    ["spec"], spec=closed(["containers"], containers=many(CONTAINER), volumes=many(VOLUME))
)
GROUP = {"rayStartParams": TEXTS, "template": POD}
WORKERS = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
CLUSTER = closed(
    ["headGroupSpec"],
    rayVersion=TEXT,
    authOptions=closed(["mode"], mode={"enum": ["disabled", "token"]}),
    headGroupSpec=closed(["rayStartParams", "template"], **GROUP),
    workerGroupSpecs=many(
        closed(
            ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
            **WORKERS,
            **GROUP,
        )
    ),
)
# The fields of ray.io/v1 RayJob that the manifest has, with the types of KubeRay 1.5.
RAY_JOB = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(
        ["name"], name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
    ),
    spec=closed(
        ["rayClusterSpec"],
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        runtimeEnvYAML=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((JOBS / "kuberay.yaml").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_every_script(script: Path) -> None:
    assert (
        subprocess.run(
            ["bash", "-n", str(script)], capture_output=True, text=True, check=True
        ).stderr
        == ""
    )


def test_every_key_that_the_job_files_set_exists() -> None:
    found = {
        name: OVERRIDE.findall(path.read_text()) for path in JOBS.iterdir() for name in [path.name]
    }
    assert {"slurm.sbatch", "ray_job.sh", "kuberay.yaml"} == found.keys() and all(found.values())
    values = {"resume_mode": "auto", "address": "auto", "nnodes": "2", "n_gpus_per_node": "8"}
    for keys in found.values():
        words = [f"{key}{values.get(key[:-1].split('.')[-1], 'x')}" for key in sorted(set(keys))]
        load_config([str(PROJECT / "configs/gsm8k_grpo.yaml"), *words], check=False)


def test_the_manifest_has_the_form_of_a_ray_job(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(RAY_JOB).validate(manifest)
    for cluster in (manifest["spec"]["rayClusterSpec"],):
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for spec in (group["template"]["spec"] for group in groups):
            mounted = [
                mount["name"]
                for container in spec["containers"]
                for mount in container["volumeMounts"]
            ]
            assert sorted(mounted) == sorted(volume["name"] for volume in spec["volumes"])


@pytest.mark.parametrize(
    "wrong", [{"backoffLimit": "3"}, {"entryPoint": "x"}, {"rayClusterSpec": {}}]
)
def test_the_schema_refuses_what_kubernetes_would(
    manifest: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest | {"spec": manifest["spec"] | wrong}, RAY_JOB)


def test_the_manifests_command_fits_its_pods(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    cluster = spec["rayClusterSpec"]
    words = shlex.split(spec["entrypoint"])
    start = words.index("main.py") + 1
    config = load_config([str(PROJECT / words[start]), *words[start + 1 :]], check=False).config
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert config.trainer.nnodes == workers["replicas"] == workers["minReplicas"]
    assert str(config.trainer.n_gpus_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    # Files that must outlive a cluster lie on the claim that every pod mounts.
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(
        any(path.startswith(f"{mount}/") for mount in mounts)
        for path in (
            config.trainer.run_dir,
            str(config.actor_rollout_ref.model.path),
            *config.data.train_files,
        )
    )
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"].isdigit()


NONE = "SubmitTime=2026-11-27T04:00:00 StartTime=2026-11-27T04:10:00 PreemptTime=None"


@pytest.mark.parametrize(
    ("shown", "is_preempted"),
    [
        (NONE, False),
        (NONE.replace("None", "2026-11-27T04:30:00"), True),
        (NONE.replace("None", "2026-11-27T04:10:00"), True),
        # Of an earlier start, which was requeued.
        (NONE.replace("None", "2026-11-27T03:50:00"), False),
        ("JobId=7", False),
        ("", False),
    ],
)
def test_a_sigterm_is_a_preemption_where_slurm_notes_one(shown: str, is_preempted: bool) -> None:
    script = (JOBS / "slurm.sbatch").read_text()
    function = re.search(r"^is_preempted\(\) \{\n.*?^\}\n", script, re.DOTALL | re.MULTILINE)
    assert function is not None and "[[ ! -e $RAY_ENDED ]] && is_preempted; then" in script
    scontrol = f"SLURM_JOB_ID=7; scontrol() {{ [[ -n '{shown}' ]] && echo '{shown}'; }}\n"
    command = ["bash", "-uc", scontrol + function[0] + "is_preempted"]
    assert (subprocess.run(command, check=False).returncode == 0) == is_preempted


class RequeuedJob:
    """A job's starts and requeues, as the script counts them."""

    def __init__(self, folder: Path, max_requeues: int) -> None:
        script = (JOBS / "slurm.sbatch").read_text()
        assert "&& may_requeue; then" in script and "\nmay_start || leave 1\n" in script
        counting = script[script.index("run_dir='' ") : script.index("# Ends Ray and exits")]
        set_up = f"set -uo pipefail; job={folder}\n"
        config = f"run_dir={folder} max_requeues={max_requeues}\n"
        self.text = set_up + counting + config
        self.latest = folder / "latest_checkpointed_iteration.txt"
        self.starts = 0

    def may(self, what: str) -> bool:
        text = f"SLURM_RESTART_COUNT={self.starts}\n{self.text}{what}"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
        assert ("trainer.max_requeues" in done.stderr) == (done.returncode != 0), done.stderr
        return done.returncode == 0

    def may_start(self) -> bool:
        allowed = self.may("may_start")
        self.starts += 1
        return allowed

    def may_requeue(self) -> bool:
        return self.may("may_requeue")


def test_slurm_requeues_without_a_new_checkpoint_no_more_often_than_it_may(tmp_path: Path) -> None:
    job = RequeuedJob(tmp_path, max_requeues=3)
    for allowed in (True, True, True, False):
        assert job.may_start()
        assert job.may_requeue() == allowed


def test_each_new_checkpoint_begins_the_count_of_requeues_anew(tmp_path: Path) -> None:
    job = RequeuedJob(tmp_path, max_requeues=1)
    for step in range(6):
        assert job.may_start()
        job.latest.write_text(str(step))
        assert job.may_requeue()
    assert job.may_start() and job.may_requeue()
    assert job.may_start() and not job.may_requeue()


def test_a_job_that_slurm_itself_starts_again_and_again_fails_too(tmp_path: Path) -> None:
    """As a node that is lost each time has it, of which the script is never told."""
    job = RequeuedJob(tmp_path, max_requeues=3)
    assert [job.may_start() for _ in range(5)] == [True, True, True, True, False]
    # Someone starts it by hand.
    assert job.may_start()


@pytest.mark.parametrize("saved", [None, "7"])
def test_no_requeue_without_progress_where_none_is_allowed(
    tmp_path: Path, saved: str | None
) -> None:
    job = RequeuedJob(tmp_path, max_requeues=0)
    if saved is not None:
        job.latest.write_text(saved)
    assert job.may_start() and not job.may_requeue()
    assert job.may_start()
    job.latest.write_text("8")
    assert job.may_requeue()


def test_a_job_s_first_start_does_not_count_those_of_another_job_with_its_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "requeues").write_text("9 \n")
    assert RequeuedJob(tmp_path, max_requeues=3).may_start()


@pytest.mark.seconds
def test_the_script_reads_its_limit_and_folder_from_the_config(tmp_path: Path) -> None:
    script = (JOBS / "slurm.sbatch").read_text()
    lines = re.search(r"^\{ read -r max_requeues .*?\"\$@\"\) \|\| leave 1\n", script, re.S | re.M)
    assert lines is not None
    folder = f"{tmp_path}/a run"
    words = ["trainer.max_requeues=5", f"trainer.default_local_dir={folder}"]
    text = f'leave() {{ echo left; exit 1; }}\npython() {{ {sys.executable} "$@"; }}\n{lines[0]}'
    text += 'echo "$max_requeues|$run_dir"\n'
    command = ["bash", "-uc", text, "sbatch", str(PROJECT / "configs/tiny_prompts.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.stdout == f"5|{folder}\n", done.stderr
    command[-2] = "trainer.max_requeues=never"
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.stdout == "left\n"
