"""Files that import from verl are told where its names are here (features/verl/names.md)."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.loading import load_extern_object
from features.verl.verl_modules import HERE, module_here, place_of, rewritten, translate
from tests.conftest import PROJECT

SOURCE = """import json
import verl.utils.torch_functional as verl_F
from verl import DataProto as Batch
from verl.utils import hf_tokenizer, torch_functional
import verl.trainer.ppo.core_algos
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    serialize_tensordict,
)

def late():
    from verl.nothing.like_it import Thing
    return verl.trainer.ppo.core_algos.agg_loss, "https://example.org/verl.trainer.ppo.core_algos.x"
"""
TRANSLATED = """import json
import features.verl.torch_functional as verl_F
from data.protocol import DataProto as Batch
import features.verl.torch_functional as torch_functional
from features.verl.utils import hf_tokenizer
import features.verl.core_algos
from data.protocol import DataProto
from features.verl.protocol import serialize_tensordict
from verl.protocol import DataProtoConfig

def late():
    from verl.nothing.like_it import Thing
    return features.verl.core_algos.agg_loss, "https://example.org/verl.trainer.ppo.core_algos.x"
"""


@pytest.mark.parametrize("module", sorted({module for there in HERE.values() for module in there}))
def test_the_modules_are_there(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_the_longest_known_part_decides() -> None:
    assert module_here("verl.tools.base_tool") == "custom.tools.verl_tools"
    assert module_here("verl.workers.rollout.vllm_rollout") == "workers.rollout.base_rollout"
    assert module_here("verl.experimental.x") == "data.protocol"
    assert place_of("verl.trainer.ppo.core_algos", "agg_loss") == "training.core_algos"
    assert place_of("verl.workers.config", "CriticConfig") == "training.config"
    assert place_of("verl.workers.config", "ActorConfig") == "features.verl.config"
    assert place_of("verl.workers.config", "McoreActorConfig") is None


def test_all_imports_of_a_file_are_translated_name_by_name() -> None:
    assert rewritten(SOURCE) == TRANSLATED
    assert [entry.first_line for entry in translate(SOURCE)] == [2, 3, 4, 5, 6, 13]
    missing = [name for entry in translate(SOURCE) for name in entry.missing]
    assert missing == ["verl.protocol.DataProtoConfig", "verl.nothing.like_it.Thing"]
    kept = "from verl.protocol import DataProtoConfig\n"
    assert rewritten(kept) == kept, "what is nowhere stays"
    assert rewritten("from verl.tools import *\n") == "from custom.tools.verl_tools import *\n"


@pytest.mark.parametrize(
    ("line", "translated"),
    [
        (
            "from verl.trainer.ppo.ray_trainer import AdvantageEstimator",
            "from features.verl.core_algos import AdvantageEstimator",
        ),
        ("from verl.trainer.ppo.utils import Role", "from training.run.roles import Role"),
        (
            "from verl.trainer.ppo.ray_trainer import Role, RayPPOTrainer",
            "from training.ray_trainer import Role\n"
            "from features.verl.trainer import RayPPOTrainer",
        ),
        ("from verl.workers.rollout import HFRollout", "from workers.hf_rollout import HFRollout"),
        (
            "from verl.workers.rollout.vllm_rollout import vLLMRollout",
            "from workers.vllm_rollout_spmd import vLLMRollout",
        ),
        (
            "from verl.single_controller.base.decorator import Dispatch, register",
            "from workers.ranks.dispatch import Dispatch, register",
        ),
        (
            "from verl.utils.py_functional import agg_loss",
            "from training.core_algos import agg_loss",
        ),
    ],
)
def test_a_name_is_found_whichever_of_verls_modules_it_comes_from(
    line: str, translated: str
) -> None:
    there = rewritten(f"{line}\n")
    names = [name.strip() for name in line.split(" import ")[1].split(",")]
    assert [word for word in names if word in there] == names
    exec(there, {})
    own = [name for entry in translate(f"{line}\n") for name in entry.here]
    assert there == "\n".join(own) + "\n"
    if "core_algos" not in translated:
        assert there == f"{translated}\n"


@pytest.mark.parametrize(
    "source",
    [
        # Nothing of these is here.
        "import verl.utils.fs as fs\nfs.copy_to_local('x')\n",
        "import verl.utils.fs\nverl.utils.fs.copy_to_local('x')\n",
        "from verl.utils.fs import *\n",
        "from verl.utils.fs import copy_to_local as copied  # a comment\n",
        "import verl.models.registry\n",
        # Which `register` is meant nobody knows.
        "from verl.utils.anything import register\n",
        "x = 'import verl'\r\ny = 1",
    ],
)
def test_what_cannot_be_resolved_stays_as_it_was(source: str) -> None:
    assert rewritten(source) == source


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        (
            "import os, verl.protocol as p\np.DataProto, os.sep\n",
            "import features.verl.protocol as p\nimport os\np.DataProto, os.sep\n",
        ),
        (
            "x = 'é'; from verl import DataProto; y = 2  # kept\n",
            "x = 'é'; from data.protocol import DataProto; y = 2  # kept\n",
        ),
        (
            "if 1: from verl.protocol import DataProto, DataProtoConfig as C\n",
            "if 1: from data.protocol import DataProto; "
            "from verl.protocol import DataProtoConfig as C\n",
        ),
        (
            "try:\r\n\tfrom verl.protocol import DataProto, DataProtoConfig as C\r\n"
            "except ImportError:\r\n\tpass",
            "try:\r\n\tfrom data.protocol import DataProto\r\n"
            "\tfrom verl.protocol import DataProtoConfig as C\r\n"
            "except ImportError:\r\n\tpass",
        ),
        (
            "import verl\nverl.DataProto, 'verl.DataProto', verl.trainer\n",
            "import verl\nverl.DataProto, 'verl.DataProto', verl.trainer\n",
        ),
        (
            "import verl\nverl.DataProto, 'verl.DataProto'  # verl.DataProto\n",
            "import data.protocol\ndata.protocol.DataProto, 'verl.DataProto'  # verl.DataProto\n",
        ),
    ],
)
def test_the_rest_of_a_line_and_its_end_stay(source: str, translated: str) -> None:
    assert rewritten(source) == translated


def test_a_file_that_is_no_python_is_named(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text("print 'verl'\n")
    script = [sys.executable, "scripts/verl_imports.py", str(file)]
    done = subprocess.run(script, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "old.py:1: it is no Python that can be read" in done.stdout and not done.stderr


def test_a_file_that_imports_verl_is_told_all_its_imports_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    with pytest.raises(ValueError, match=r"mine\.py imports from verl, which is not") as caught:
        load_extern_object(str(file), "late")
    said = str(caught.value)
    for line in (
        "line 2: import features.verl.torch_functional as verl_F",
        "line 3: from data.protocol import DataProto as Batch",
        "line 6: from features.verl.protocol import serialize_tensordict",
        "line 6: verl.protocol.DataProtoConfig is not here, see features/verl/names.md",
        "line 13: verl.nothing.like_it.Thing is not here",
    ):
        assert line in said
    assert "features.verl.core_algos for verl.trainer.ppo.core_algos in the whole file" in said


def test_a_helper_that_imports_verl_is_the_file_that_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_of_verl.py").write_text("from verl import DataProto\n")
    file = tmp_path / "mine.py"
    file.write_text("import helper_of_verl\n")
    with pytest.raises(ValueError, match=r"helper_of_verl\.py imports from verl"):
        load_extern_object(str(file), "late")


def test_other_imports_that_fail_keep_their_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import verlet_of_nobody\n")
    with pytest.raises(ModuleNotFoundError, match="verlet_of_nobody"):
        load_extern_object(str(file), "Search")


@pytest.mark.seconds
def test_the_script_writes_the_imports_and_says_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    script = [sys.executable, "scripts/verl_imports.py", str(file), "--write"]
    done = subprocess.run(script, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Thing is not here" in done.stdout
    assert file.read_text() == TRANSLATED


def rows_of_the_table() -> Iterator[tuple[str, list[str], str]]:
    """Yields (module of verl, names, what the table says of them)."""
    module = ""
    for line in (PROJECT / "features/verl/names.md").read_text().splitlines():
        if line.startswith("## "):
            module = line.removeprefix("## ").strip("` ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            yield module, re.findall(r"`(\w+)`", cells[0]), cells[1]


def test_the_table_of_names_is_true() -> None:
    """Names that it calls the same, or different, can be imported; absent ones are nowhere."""
    rows = list(rows_of_the_table())
    counts = {"same": 0, "differs": 0, "absent": 0}
    for module, names, verdict in rows:
        counts[verdict] += len(names)
        for name in names:
            is_there = place_of(module, name) is not None
            assert is_there == (verdict != "absent"), f"{module}.{name}: {verdict}"
    assert counts["same"] > 100 and counts["differs"] > 10 and counts["absent"] > 30, counts
