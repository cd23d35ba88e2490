"""Tests features: their sections, older keys and modules, and folders that are gone."""

from __future__ import annotations

import importlib
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from scripts.feature_index import index
from tests.conftest import PROJECT
from training import features as registry
from training.config import PPOConfig
from training.config.layers import Layers
from training.config.leaves import leaves
from training.config.loader import ConfigError, load_config, read_config
from training.config.reference import to_yaml
from training.config.schema.actor import ActorConfig
from training.config.schema.trainer import TrainerConfig
from training.config.section import Section
from training.config.translator import KeyTranslator, key_translator
from training.features import Feature, FeatureError, features
from training.run.recorded_config import record_config

# Older names that settings of the core have in these tests; in runs only features move theirs.
OLD = "trainer.rounds"
NEW = "actor_rollout_ref.actor.ppo_epochs"
OLD_WORD = "trainer.older_is"
NEW_WORD = "algorithm.rollout_correction.rollout_is"
# A feature's setting, and its older name, as training/feature_index.yaml has it.
ABSENT = "supervisor.max_restarts"
OLDER_ABSENT = "trainer.max_restarts"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the core that have moved."""
    names = {OLD: NEW, OLD_WORD: NEW_WORD}
    for reader in ("training.config.layers", "training.run.recorded_config"):
        monkeypatch.setattr(f"{reader}.moved_keys", lambda: names)


def rounds_of(config: PPOConfig) -> int:
    return config.actor_rollout_ref.actor.ppo_epochs


def word_of(config: PPOConfig) -> str | None:
    return config.algorithm.rollout_correction.rollout_is


def load(*argv: str) -> PPOConfig:
    return load_config(list(argv), check=False).config


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return caught.value.problems


def run_python(code: str, *argv: str, folder: Path = PROJECT) -> str:
    """Runs code in a process of its own; returns what it prints, the log included."""
    done = subprocess.run(
        [sys.executable, *argv, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# Sections.


def test_each_feature_with_settings_is_a_section_under_its_folders_name() -> None:
    config = PPOConfig()
    for name, feature in features().items():
        if feature.section is None:
            assert name not in vars(config)
        else:
            assert issubclass(feature.section, Section)
            assert type(vars(config)[name]) is feature.section
            assert config.section(feature.section) is vars(config)[name]
            assert all(leaf.doc for _, leaf in leaves(vars(config)[name]))


def test_a_config_without_the_section_says_that_the_feature_may_be_missing() -> None:
    with pytest.raises(LookupError, match="no section ActorConfig: is its feature there"):
        PPOConfig().section(ActorConfig)


def test_a_config_with_features_can_be_pickled() -> None:
    config = load(f"{NEW}=2")
    assert pickle.loads(pickle.dumps(config)) == config
    assert rounds_of(pickle.loads(pickle.dumps(config))) == 2


def test_a_config_that_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load(f"{NEW}=2")))
    assert load(str(tmp_path / "config.yaml")) == load(f"{NEW}=2")


@pytest.mark.seconds
def test_reading_every_feature_imports_nothing_but_their_settings() -> None:
    code = (
        "import sys; from training.config import PPOConfig; PPOConfig()\n"
        "print(*[name for name in sys.modules if name.startswith('features.')])\n"
        "assert 'torch' not in sys.modules"
    )
    for name in run_python(code).split():
        words = name.split(".")
        assert len(words) == 2 or words[2] in ("feature", "settings"), name


# Older keys.


@pytest.mark.parametrize("written", ["nested", "dotted", "in a word with its section"])
def test_an_older_key_is_read_in_yaml_and_said_in_one_line(
    written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: None
) -> None:
    texts = {
        "nested": "trainer:\n  rounds: 3\n",
        "dotted": f"{OLD}: 3\n",
        "in a word with its section": "trainer: {rounds: 3}\n",
    }
    (tmp_path / "a.yaml").write_text(texts[written])
    assert rounds_of(load(str(tmp_path / "a.yaml"))) == 3
    assert caplog.messages == [f"{OLD} is called {NEW} now (a.yaml)"]


def test_an_older_key_is_read_on_the_command_line(
    caplog: pytest.LogCaptureFixture, moved: None
) -> None:
    assert rounds_of(load(f"{OLD}=3")) == 3
    assert caplog.messages == [f"{OLD} is called {NEW} now (command line)"]


def test_an_older_keys_word_is_read_as_the_settings_that_it_is_called_now(
    tmp_path: Path, moved: None
) -> None:
    """To YAML a bare `off` is false; where the setting has the word it is meant."""
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {rollout_correction: {rollout_is: off}}")
    for argv in ([f"{OLD_WORD}=off"], [f"{NEW_WORD}=off"], [str(file)]):
        assert word_of(load(*argv)) == "off"
    file.write_text("trainer: {older_is: off}")
    assert word_of(load(str(file))) == "off"


def test_an_older_key_is_taken_back(tmp_path: Path, moved: None) -> None:
    (tmp_path / "a.yaml").write_text(f"{OLD}: 3\n")
    assert rounds_of(load(str(tmp_path / "a.yaml"), f"~{OLD}")) == 1
    assert rounds_of(load(str(tmp_path / "a.yaml"), f"~{NEW}")) == 1


def test_an_older_key_is_read_in_a_mapping_from_python(moved: None) -> None:
    assert rounds_of(read_config({"trainer": {"rounds": 3}}, check=False)) == 3
    assert rounds_of(read_config({OLD: 3}, check=False)) == 3


def test_a_file_that_gives_older_and_newer_key_with_other_values_is_told(
    tmp_path: Path, moved: None
) -> None:
    file = tmp_path / "both.yaml"
    for text in (
        "actor_rollout_ref: {actor: {ppo_epochs: 2}}\ntrainer: {rounds: 3}\n",
        "trainer: {rounds: 3}\nactor_rollout_ref: {actor: {ppo_epochs: 2}}\n",
    ):
        file.write_text(text)
        [problem] = problems_of(str(file))
        assert problem.startswith(f"{NEW}=") and "under another name it is" in problem
    file.write_text("actor_rollout_ref: {actor: {ppo_epochs: 3}}\ntrainer: {rounds: 3}\n")
    assert rounds_of(load(str(file))) == 3


def test_a_relative_link_in_an_older_key_is_that_of_its_older_place(
    tmp_path: Path, moved: None
) -> None:
    file = tmp_path / "link.yaml"
    file.write_text('trainer: {progress: "off", older_is: "${.progress}"}')
    assert word_of(load(str(file))) == "off"


def test_an_older_key_that_is_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"trainer.total_training_steps": NEW, "older.key": "nothing.such"}
    monkeypatch.setattr("training.config.layers.moved_keys", lambda: taken)
    first, second = problems_of("trainer.total_training_steps=2")
    assert "trainer.total_training_steps: a feature's moved_keys" in first
    assert "older.key" in second


def test_the_command_lines_older_key_wins_over_the_files_newer_one(
    tmp_path: Path, moved: None
) -> None:
    (tmp_path / "a.yaml").write_text(f"{NEW}: 1\n")
    assert rounds_of(load(str(tmp_path / "a.yaml"), f"{OLD}=3")) == 3


def test_a_link_to_an_older_key_finds_it(moved: None) -> None:
    config = load(f"{NEW}=4", f"trainer.total_epochs=${{{OLD}}}")
    assert config.trainer.total_epochs == 4


def test_a_wrong_value_of_an_older_key_is_told_under_its_name_now(moved: None) -> None:
    (problem,) = problems_of(f"{OLD}=-1")
    assert problem.startswith(f"{NEW}='-1' (command line)")


def test_the_saved_config_of_an_older_run_is_read_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: None
) -> None:
    saved = yaml.safe_load(to_yaml(PPOConfig()))
    del saved["actor_rollout_ref"]["actor"]["ppo_epochs"]
    saved["trainer"]["rounds"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert rounds_of(load(str(tmp_path / "config.yaml"))) == 2
    assert caplog.messages == [f"{OLD} is called {NEW} now (config.yaml)"]


@pytest.mark.seconds
def test_a_run_that_goes_on_from_an_older_one_has_changed_nothing(
    tmp_path: Path, moved: None
) -> None:
    saved = yaml.safe_load(to_yaml(PPOConfig()))
    del saved["actor_rollout_ref"]["actor"]["ppo_epochs"]
    saved["trainer"]["rounds"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert record_config(tmp_path, PPOConfig(), step=1) == {}
    changed = load(f"{NEW}=2")
    assert record_config(tmp_path, changed, step=2) == {NEW: (1, 2)}


# Older modules.


@pytest.mark.seconds
def test_an_older_module_is_the_module_itself_and_is_said_once() -> None:
    said = run_python(
        "import contrib.verifier_process as old\n"
        "from contrib import verifier_process\n"
        "from contrib.verifier_process import VerifierProcess\n"
        "import custom.verifier_process as new\n"
        "assert old is new is verifier_process and new.VerifierProcess is VerifierProcess\n"
        "assert new.__name__ == new.__spec__.name == 'custom.verifier_process'"
    )
    assert said == "contrib.verifier_process is called custom.verifier_process now\n"


@pytest.mark.seconds
def test_a_pickle_of_an_older_module_finds_its_class() -> None:
    run_python(
        "import pickle\n"
        "names = [n for n in vars(__import__('custom.verifier_process', fromlist=['x']))]\n"
        "kind = next(n for n in names if n[0].isupper() and n[1].islower())\n"
        "data = f'ccontrib.verifier_process\\n{kind}\\n.'.encode()\n"
        "import custom\n"
        "import contrib\n"
        "assert pickle.loads(data).__name__ == kind\n"
    )


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"training\.no_such_module"):
        __import__("training.no_such_module")


def test_a_module_of_a_folder_that_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = registry.AbsentFeature(moved_modules={"contrib.gone": "features.gone.parts"})
    monkeypatch.setattr(registry, "absent_features", lambda: {"gone": gone})
    with pytest.raises(
        ModuleNotFoundError,
        match=r"contrib\.gone is features\.gone\.parts now, a part of features/gone, which is",
    ):
        importlib.import_module("contrib.gone")


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("data.conversation", "data.turn_tokens"),
        ("data.verl_batch", "data.protocol"),
        ("training.generation", "training.ray_trainer"),
    ],
)
def test_files_that_were_joined_are_found_under_their_older_names(old: str, now: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(now)


MOVED_AND_HERE = {
    old: new for each in features().values() for old, new in each.moved_modules.items()
}


@pytest.mark.parametrize("name", sorted(MOVED_AND_HERE))
def test_whatever_is_called_otherwise_now_is_there(name: str) -> None:
    new = MOVED_AND_HERE[name].replace(".", "/")
    assert (PROJECT / f"{new}.py").is_file() or (PROJECT / new / "__init__.py").is_file()
    old = name.replace(".", "/")
    assert not (PROJECT / f"{old}.py").exists()


# Folders that are gone.


def without_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the layers know the settings of the core alone."""
    own = {key: leaf for key, leaf in leaves(PPOConfig()) if key != ABSENT}
    monkeypatch.setattr("training.config.layers.leaves", lambda config: own.items())


def test_a_folder_with_nothing_but_compiled_files_is_no_feature(no_features: Path) -> None:
    (no_features / "gone" / "__pycache__").mkdir(parents=True)
    assert features() == {}


def test_a_file_that_says_nothing_of_its_feature_is_named(
    no_features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_features / "mute").mkdir()
    (no_features / "mute/feature.py").write_text("x = 1\n")
    (no_features / "__init__.py").write_text("")
    monkeypatch.setattr("importlib.import_module", lambda name: registry)
    with pytest.raises(FeatureError, match=r"mute/feature\.py has no FEATURE = Feature"):
        features()


def test_a_folder_that_no_package_may_be_called_is_named(no_features: Path) -> None:
    (no_features / "my-alarms").mkdir()
    (no_features / "my-alarms/feature.py").write_text("")
    with pytest.raises(FeatureError, match=r"features/my-alarms is no name of a Python package"):
        features()


@pytest.mark.parametrize(
    "text",
    [
        "FEATURE = Feature(\n",
        "import no_such_module\n",
        "import sys\nsys.exit()\n",
        "raise GeneratorExit\n",
    ],
)
def test_a_file_that_cannot_be_imported_is_told_in_a_sentence(
    no_features: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (no_features / "torn").mkdir()
    (no_features / "torn/feature.py").write_text(text)

    def import_module(name: str) -> None:
        assert name == "features.torn.feature"
        exec(compile(text, "feature.py", "exec"), {})

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(
        FeatureError, match=r"torn/feature\.py cannot be imported: .*(Error|Exit): .*mend"
    ):
        features()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("feature", "settings", "shown"),
    [
        ("import sys\nsys.exit(0)\n", "", r"new/feature\.py cannot be imported: SystemExit: 0"),
        ("FEATURE = Feature(section='S')\n", "", "section='S' is no class of"),
        ("FEATURE = Feature(section=S)\n", "class S: pass\n", "is no class of"),
        (
            "FEATURE = Feature(section=S)\n",
            "class S(Section):\n    x: int\n",
            "cannot be made of its defaults: 1 validation error for S x Field required",
        ),
        (
            "FEATURE = Feature(section=S)\n",
            "class S(Section):\n    x: int = 'a'\n",
            "cannot be made of its defaults: .*should be a valid integer",
        ),
        (
            "FEATURE = Feature(checks='features.new.settings:check')\n",
            "raise SystemExit(0)\n",
            "checks='features.new.settings:check' of features/new/feature.py cannot be imported",
        ),
        (
            "FEATURE = Feature(checks='features.new.settings:check')\n",
            "def check(config): raise KeyError('x')\n",
            "features/new/feature.py failed: KeyError: 'x'; mend it",
        ),
        (
            "FEATURE = Feature(checks='features.new.settings:check')\n",
            "def check(config): return 'wrong'\n",
            r"feature\.py returned the text 'wrong'; return a list: \['wrong'\]",
        ),
        (
            "FEATURE = Feature(checks='features.new.settings:check')\n",
            "def check(config): return [5]\n",
            r"feature\.py returned a list with 5, a int; each entry is a text",
        ),
        (
            "FEATURE = Feature(checks='features.new.settings:check')\n",
            "def check(config): return None\n",
            "features/new/feature.py failed: TypeError: 'NoneType' object is not iterable",
        ),
    ],
)
def test_a_run_with_a_broken_feature_ends_with_a_sentence_and_exit_code_2(
    tmp_path: Path, feature: str, settings: str, shown: str
) -> None:
    """`sys.exit()` in a feature's file ended the command with exit code 0, and nothing was made."""
    for name in ("data", "training", "custom", "workers", "contrib", "configs"):
        shutil.copytree(
            PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(PROJECT / "main.py", tmp_path)
    new = tmp_path / "features/new"
    new.mkdir(parents=True)
    (tmp_path / "features/__init__.py").touch()
    (new / "__init__.py").touch()
    reads = "from features.new.settings import S\n" if "section=S" in feature else ""
    (new / "feature.py").write_text(f"from training.features import Feature\n{reads}{feature}")
    (new / "settings.py").write_text(f"from training.config.section import Section\n{settings}")
    made = subprocess.run(
        [sys.executable, "main.py", "configs/tiny_prompts.yaml", "--explain"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 2, made.stderr
    (line,) = made.stderr.strip().splitlines()[-1:]
    assert re.search(shown, line) and "Traceback" not in made.stderr


@pytest.mark.parametrize(
    ("brings", "shown"),
    [
        ({"translator": "a:B"}, "both bring a translator, under translator"),
        ({"modes": {"--mine": "a:run"}}, "both bring --mine, under modes"),
        ({"moved_keys": {"trainer.mine": "one.mine"}}, "both bring trainer.mine, under moved_keys"),
    ],
)
def test_two_features_that_bring_the_same_name_are_told(
    no_features: Path, monkeypatch: pytest.MonkeyPatch, brings: dict[str, Any], shown: str
) -> None:
    for name in ("one", "two"):
        (no_features / name).mkdir()
        (no_features / name / "feature.py").write_text("")
    module = SimpleNamespace(FEATURE=Feature(**brings))
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    with pytest.raises(FeatureError, match=f"features/one and features/two {shown}"):
        features()


def test_the_index_equals_what_the_features_say() -> None:
    assert registry.INDEX.read_text() == index(), "run: python scripts/feature_index.py"


def test_the_index_keeps_what_it_says_of_a_folder_that_is_gone(no_features: Path) -> None:
    assert registry.INDEX.read_text() == index()


def test_a_default_of_an_absent_feature_is_a_line_in_the_log(
    no_features: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_the_section(monkeypatch)
    layers = Layers()
    layers.add_tree({"supervisor": {"max_restarts": 0}, OLDER_ABSENT: "0"}, "a.yaml")
    layers.add_tree({"supervisor": None}, "a.yaml")
    layers.log_notes()
    assert layers.problems == []
    assert caplog.messages == [
        "settings of features/supervisor, not here, are at their defaults (a.yaml): they have no "
        "effect"
    ]


@pytest.mark.parametrize("key", [OLDER_ABSENT, ABSENT, "supervisor.no_such_key"])
def test_any_other_value_of_an_absent_feature_is_refused(
    key: str, no_features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_section(monkeypatch)
    layers = Layers()
    layers.add_tree({key: 2}, "a.yaml")
    assert layers.problems == [
        f"{key}=2 (a.yaml): is a setting of features/supervisor, which is not here: put the "
        "folder back, or take the key out"
    ]


def test_loggers_without_the_folder_that_writes_them_are_refused(no_features: Path) -> None:
    sentence = (
        "trainer.logger has {0}, which features/trackers writes, and that is not here: put the "
        "folder back, or take {0} out"
    )
    named = TrainerConfig(logger=("console", "wandb"))
    assert list(named.problems()) == [sentence.format("wandb")]
    # Nobody asked for the default: a run without its file is told, and goes on.
    assert list(TrainerConfig().problems()) == []
    assert list(TrainerConfig().warnings()) == [sentence.format("file")]


def test_the_older_name_that_was_meant_is_told(moved: None) -> None:
    (problem,) = problems_of("trainer.round=2")
    assert problem.endswith(f"Did you mean {OLD}, which is called {NEW} now?")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("replay_episodes", "records"),
        ("gallery", "records"),
        ("learn_runs", "run_page"),
        ("verl_imports", "verl"),
    ],
)
def test_a_script_that_works_on_what_a_feature_makes_names_the_folder(
    script: str, name: str, no_features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"scripts.{script}", raising=False)
    with pytest.raises(ImportError, match=f"is a part of features/{name}, which is not here"):
        importlib.import_module(f"scripts.{script}")


def test_an_option_of_an_absent_feature_names_the_folder(no_features: Path) -> None:
    from training.modes import chosen_mode, describe_missing_mode

    assert chosen_mode(["--plan"]) is None
    assert describe_missing_mode(["a.yaml", "--plan"]) == (
        "--plan is brought by features/memory_plan, which is not here: put the folder back"
    )
    assert describe_missing_mode(["a.yaml", "--explain"]) is None


def test_without_a_translator_our_keys_load_and_others_are_unknown_with_a_sentence(
    no_features: Path,
) -> None:
    assert type(key_translator()) is KeyTranslator
    assert load("data.train_batch_size=8").data.train_batch_size == 8
    (problem,) = problems_of("actor_rollout_ref.actor.use_gpg_loss=true")
    assert problem.startswith("actor_rollout_ref.actor.use_gpg_loss=True (command line): there is")
    assert "features/verl, which reads other programs' keys, is not here" in problem


def test_a_name_in_custom_whose_feature_is_gone_names_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import custom.tools.builtin as builtin

    monkeypatch.setitem(sys.modules, "features.sandbox", None)
    monkeypatch.setitem(sys.modules, "features.sandbox.python_tool", None)
    with pytest.raises(ImportError, match="PythonTool is a part of features/sandbox, which is no"):
        _ = builtin.PythonTool


@pytest.mark.seconds
def test_a_new_feature_of_one_file_is_found_with_its_section(tmp_path: Path) -> None:
    for name in ("data", "training", "custom", "workers", "features", "contrib"):
        shutil.copytree(
            PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    new = tmp_path / "features/gpu_seconds"
    new.mkdir()
    (new / "__init__.py").touch()
    (new / "settings.py").write_text(
        "from training.config.section import PositiveInt, Section\n"
        "class GpuSecondsSettings(Section):\n"
        '    """Counts."""\n'
        "    every: PositiveInt = 5  #: steps\n"
    )
    (new / "checks.py").write_text(
        "def check(config):\n"
        "    yield f'gpu_seconds.every={config.gpu_seconds.every} is too often'\n"
    )
    (new / "feature.py").write_text(
        "from features.gpu_seconds.settings import GpuSecondsSettings\n"
        "from training.features import Feature\n"
        "FEATURE = Feature(section=GpuSecondsSettings, checks='features.gpu_seconds.checks:check')"
    )
    said = run_python(
        "from training.config.loader import load_config, ConfigError\n"
        "try:\n"
        "    load_config(['gpu_seconds.every=7'])\n"
        "except ConfigError as error:\n"
        "    print(error)\n",
        folder=tmp_path,
    )
    assert "gpu_seconds.every=7 is too often" in said


@pytest.mark.seconds
def test_the_settings_package_imports_nothing_before_a_name_is_asked_for() -> None:
    run_python(
        "import sys, training.config as config\n"
        "assert 'pydantic' not in sys.modules\n"
        "assert all(hasattr(config, name) for name in dir(config))\n"
        "assert config.FSDPActorConfig is config.ActorConfig\n"
        "assert 'torch' not in sys.modules"
    )


def test_a_script_that_evaluates_without_the_feature_is_told_its_folder(no_features: Path) -> None:
    from setup import evaluate

    with pytest.raises(
        ImportError, match=r"setup\.evaluate is a part of features/evaluation, which"
    ):
        evaluate({}, "model")
