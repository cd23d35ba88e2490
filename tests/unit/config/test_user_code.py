"""Tests the checks of users' own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.loading import load_extern_object
from tests.unit.config.helpers import assert_refused, checked, warned


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.custom_cls.path={model}/config.json"],
            "data.custom_cls.name is missing: which class of {model}/config.json?",
        ),
    ],
)
def test_a_class_without_a_name_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


@pytest.mark.parametrize(
    "key", ["custom_algorithm", "custom_reward_function.path", "data.custom_cls.path"]
)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
        (
            "x = 1\nimport no_such_package\n",
            "ModuleNotFoundError in line 2: No module named 'no_such_package'",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_problem(
    key: str, text: str, reason: str, runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    more = (
        ["data.custom_cls.name=Mine"] if "custom_cls" in key else ["algorithm.adv_estimator=mine"]
    )
    found = checked(runnable, f"{key}={tmp_path / 'mine.py'}", *more)
    wanted = (
        f"{key}={tmp_path / 'mine.py'} cannot be loaded: {reason}; mend the file, or take it out"
    )
    if "ModuleNotFoundError" in reason:
        wanted = wanted.replace(
            "mend the file, or take it out",
            "install it, or, where it is a file of yours, put that beside this one or start the "
            "run with PYTHONPATH=FOLDER, the folder that it is in",
        )
    assert wanted in found
    # Whether the estimator exists is known only where custom_algorithm has run.
    assert len(found) == (2 if key == "custom_reward_function.path" else 1)


def test_modules_beside_a_users_file_are_found_also_later(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "beside_one.py").write_text("SCORE = 2.0\n")
    (tmp_path / "beside_two.py").write_text("SCORE = 3.0\n")
    (tmp_path / "score.py").write_text(
        "from beside_one import SCORE\n\n\n"
        "def compute_score(**_):\n    import beside_two\n\n    return SCORE + beside_two.SCORE\n"
    )
    path = str(tmp_path / "score.py")
    assert checked(runnable, f"custom_reward_function.path={path}") == []
    assert load_extern_object(path, "compute_score")() == 5.0


def test_a_fault_in_a_module_beside_a_users_file_has_that_ones_line(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "beside_faulty.py").write_text("import math\n\nmath.sqrt(-1)\n")
    (tmp_path / "mine.py").write_text("import beside_faulty\n")
    (problem, *_) = checked(runnable, f"custom_algorithm={tmp_path / 'mine.py'}")
    assert f"ValueError in {tmp_path / 'beside_faulty.py'}, line 3: " in problem


def test_a_fault_in_the_file_of_a_tool_has_its_line_where_a_yaml_names_the_tool(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "scale.py").write_text("class Scale:\n    x = {}['schema']\n")
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n- class_name: {tmp_path}/scale.py:Scale\n  config: {{}}\n"
        "  tool_schema: {type: function, function: {name: scale}}\n"
    )
    found = checked(
        runnable,
        f"agent.tools=[{tmp_path / 'tools.yaml'}]",
        "agent.environment.name=custom.envs.tool_arithmetic:ToolArithmetic",
    )
    assert any(
        f"cannot be loaded: KeyError in {tmp_path / 'scale.py'}, line 2: 'schema'" in text
        for text in found
    ), found


def test_a_file_must_be_python_and_hold_what_is_named(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("pass\n")
    (problem,) = checked(runnable, f"custom_algorithm={tmp_path / 'mine.txt'}")
    assert "is not a Python file; its name must end in .py" in problem
    (tmp_path / "score.py").write_text("def score(**_):\n    return 0.0\n\nweight = 3\n")
    path = f"custom_reward_function.path={tmp_path / 'score.py'}"
    assert checked(runnable, path) == [
        f"custom_reward_function.name=compute_score: {tmp_path / 'score.py'} does not define "
        "'compute_score'; it has: score"
    ]
    assert checked(runnable, path, "custom_reward_function.name=weight") == [
        f"custom_reward_function.name=weight: in {tmp_path / 'score.py'} it is a int; it must be "
        "a function or a class"
    ]
    batch = "reward_model.reward_manager=batch"
    assert checked(runnable, path, "custom_reward_function.name=score", batch) == []


@pytest.mark.parametrize(
    ("setting", "path_key"),
    [
        ("data.custom_cls.name=Mine", "data.custom_cls.path"),
        ("data.sampler.class_name=Mine", "data.sampler.class_path"),
        ("custom_reward_function.name=f", "custom_reward_function.path"),
    ],
)
def test_a_name_without_the_file_that_has_it_is_a_warning(
    setting: str, path_key: str, runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, runnable, setting) == [f"{setting} has no effect without {path_key}"]


@pytest.mark.parametrize(
    "key", ["custom_algorithm", "custom_reward_function.path", "data.custom_cls.path"]
)
def test_a_file_that_ends_the_program_as_it_is_loaded_is_a_problem(
    key: str, runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)\n")
    more = (
        ["data.custom_cls.name=Mine"] if "custom_cls" in key else ["algorithm.adv_estimator=mine"]
    )
    found = checked(runnable, f"{key}={tmp_path / 'mine.py'}", *more)
    problem = next(each for each in found if "SystemExit" in each)
    assert problem.startswith(f"{key}={tmp_path / 'mine.py'}: ")
    assert "ends the program as it is loaded (SystemExit: 3)" in problem
