"""Tests prompts, seeds and the loading of users' files."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data import turn_tokens
from data.loading import load_extern_object, load_object
from data.seeds import seed_for
from data.turn_tokens import CHATML_TEMPLATE, encode_chat, pad_token_id, render_chat

WORDS = [
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "user",
    "assistant",
    "system",
    "two",
    "plus",
    "three",
    "[BOS]",
]


def make_tokenizer(**kwargs) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **kwargs)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return fast


def test_a_chat_template_is_rendered_with_the_generation_prompt():
    tokenizer = make_tokenizer(
        chat_template="{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt else '' }}{{ extra }}"
    )
    messages = [{"role": "system", "content": "two"}, {"role": "user", "content": "plus"}]
    assert encode_chat(tokenizer, messages) == [
        WORDS.index(w) for w in ["system", "two", "user", "plus", "assistant"]
    ]
    assert encode_chat(tokenizer, messages, extra=" three")[-1] == WORDS.index("three")
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == "system two user plus "


def test_a_plain_string_is_one_user_message():
    tokenizer = make_tokenizer(chat_template=CHATML_TEMPLATE)
    as_list = encode_chat(tokenizer, [{"role": "user", "content": "two plus three"}])
    assert encode_chat(tokenizer, "two plus three") == as_list
    assert as_list == [1, 3, 6, 7, 8, 2, 1, 4]


def test_without_a_template_chatml_is_used_and_said_once(caplog):
    tokenizer = make_tokenizer(name_or_path="a name of which nothing was said")
    with caplog.at_level(logging.WARNING):
        texts = [render_chat(tokenizer, "two") for _ in range(3)]
    assert texts[0] == "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert sum("ChatML" in record.message for record in caplog.records) == 1
    assert tokenizer.chat_template is None


def test_the_tokenizers_own_bos_is_not_added_to_a_rendered_prompt():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(chat_template=CHATML_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 9)]
    )
    assert tokenizer.encode("two") == [9, 6]
    assert encode_chat(tokenizer, "two")[0] == 1


def test_the_pad_token_falls_back_to_end_of_sequence():
    assert pad_token_id(make_tokenizer(pad_token="<unk>", eos_token="<|im_end|>")) == 0
    assert pad_token_id(make_tokenizer(eos_token="<|im_end|>")) == 2
    with pytest.raises(
        ValueError, match=r"neither a pad_token nor an eos_token; set tokenizer\.pad_token"
    ):
        pad_token_id(make_tokenizer())


# --- Seeds ---


@pytest.mark.seconds
def test_a_seed_is_the_same_in_another_process():
    code = "from data.seeds import seed_for; print(seed_for(1, 2, 3), seed_for(1, 2, 3, 4, 5))"
    root = Path(turn_tokens.__file__).parents[1]
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [str(seed_for(1, 2, 3)), str(seed_for(1, 2, 3, 4, 5))]


def test_seeds_never_change_between_versions():
    assert (seed_for(0, 0, 0), seed_for(1, 2, 3, 4, 5)) == (1967086431, 1389380330)


def test_every_part_of_a_seeds_name_matters_and_seeds_stay_in_range():
    seeds = {
        seed_for(r, s, g, n, t)
        for r in (0, 1)
        for s in (0, 1, 11)
        for g in (0, 1, 10)
        for n in (None, 0, 1)
        for t in (None, 0, 1)
    }
    assert len(seeds) == 2 * 3 * 3 * 3 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)


# --- Loading ---


def test_a_file_is_executed_once_and_its_classes_keep_their_identity(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Thing:\n    x: int = 3\n\nvalue = object()\n"
    )
    thing = load_extern_object(str(tmp_path / "mine.py"), "Thing")
    monkeypatch.chdir(tmp_path)
    assert load_extern_object("mine.py", "Thing") is thing and thing().x == 3
    assert load_extern_object("./mine.py", "value") is load_extern_object("mine.py", "value")


def test_threads_that_load_a_file_at_once_all_get_the_whole_of_it(tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(0.2)\nvalue = object()\n")
    with ThreadPoolExecutor(4) as threads:
        found = set(
            threads.map(lambda _: load_extern_object(str(tmp_path / "slow.py"), "value"), range(4))
        )
    assert len(found) == 1


def test_a_module_that_is_already_imported_is_not_loaded_twice():
    assert load_extern_object(turn_tokens.__file__, "encode_chat") is encode_chat


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"where = {folder!r}\n")
    assert [load_extern_object(str(tmp_path / f / "same.py"), "where") for f in ("a", "b")] == [
        "a",
        "b",
    ]


def test_loading_errors_say_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.py' is not a file"):
        load_extern_object("nowhere.py", "f")
    (tmp_path / "mine.py").write_text("def compute_score(): ...\n_hidden = 1\n")
    with pytest.raises(
        ValueError, match=r"mine\.py does not define 'score'; it has: compute_score$"
    ):
        load_extern_object(str(tmp_path / "mine.py"), "score")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"must end in \.py"):
        load_extern_object(str(tmp_path / "notes.txt"), "x")


def test_an_error_inside_the_file_keeps_its_traceback_and_can_be_fixed(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def inner():\n    return 1 / 0\n\ninner()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        load_extern_object(str(file), "inner")
    assert caught.traceback[-1].name == "inner" and "broken.py" in caught.value.__notes__[0]
    file.write_text("def inner():\n    return 1\n")
    assert load_extern_object(str(file), "inner")() == 1


def test_what_a_file_imports_is_no_candidate(tmp_path):
    (tmp_path / "coin.py").write_text(
        "from __future__ import annotations\nimport random\nfrom typing import Any\n"
        "from custom.env import BaseEnvironment\n\n"
        "SIDES = 2\n\ndef toss(): ...\n\nclass Coin(BaseEnvironment): ...\n"
    )
    for name, wanted in {
        "Koin": "it has: Coin. Did you mean 'Coin'?",
        "tos": "it has: Coin, SIDES, toss. Did you mean 'toss'?",
        "Any_": "it has: Coin",
    }.items():
        with pytest.raises(ValueError) as error:
            load_extern_object(str(tmp_path / "coin.py"), name)
        assert str(error.value).endswith(wanted)
    with pytest.raises(ValueError, match=r"it has: GuessNumber, .*Did you mean 'GuessNumber'\?"):
        load_object("custom.envs.guess_number:GuesNumber", "environment")
