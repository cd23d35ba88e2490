"""Each text of a row is in its prompt, or the row is refused with its file and number."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from custom.envs.dataset_row import DatasetRowEnvironment
from data.prompt_messages import text_messages, without_added_nulls
from data.prompt_rows import PromptCollator
from data.rl_dataset import RLHFDataset
from training.config.schema.data import DataConfig

# Takes strings only, and knows no role but these.
TEMPLATE = """{%- for m in messages %}
{%- if m.role in ["system", "user", "assistant", "tool"] %}<|im_start|>{{ m.role }}
{{ m.content if m.content is string else '' }}{%- for call in (m.tool_calls or []) %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{%- endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(template: str = TEMPLATE, letters: str | None = None) -> Any:
    """Makes a tokenizer of bytes; of these letters, and an unknown token, where they are given."""
    names = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    alphabet = sorted(letters or pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*names, *alphabet])}
    unknown = "<unk>" if letters else None
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    if not letters:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token=unknown,
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def prompts_of(tmp_path, *conversations, tokenizer=None, suffix="parquet", **columns) -> list[str]:
    """Returns the rows' prompts as text."""
    rows = [
        {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": "5"}, **columns}
        for prompt in conversations
    ]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows))
    tokenizer = tokenizer or make_tokenizer()
    dataset = RLHFDataset(str(file), tokenizer, {"max_prompt_length": 512})
    return [tokenizer.decode(dataset[i]["raw_prompt_ids"]) for i in range(len(dataset))]


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seen"},
    ]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_parts_of_text_are_one_string(tmp_path, suffix) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    [prompt] = prompts_of(tmp_path, user(parts), suffix=suffix)
    assert "user\n2 + 3?<|im_end|>" in prompt


def test_arguments_that_arrow_adds_are_left_out(tmp_path) -> None:
    first, second = prompts_of(
        tmp_path, called({"a": 1, "b": {"c": 2}}), called({"query": "x", "b": {"d": [1]}})
    )
    assert '{"a": 1, "b": {"c": 2}}' in first and '"query": "x"' in second
    assert "null" not in first + second and "None" not in first + second


def test_null_that_a_json_file_has_in_arguments_stays(tmp_path) -> None:
    [prompt] = prompts_of(tmp_path, called({"a": None}), suffix="json")
    assert '{"a": null}' in prompt


def test_arguments_as_json_text_are_written_as_what_they_are(tmp_path) -> None:
    [prompt] = prompts_of(tmp_path, called('{"a": "say \\"hi\\""}'))
    assert '{"a": "say \\"hi\\""}' in prompt


def test_pairs_of_a_map_are_a_mapping() -> None:
    assert without_added_nulls([("a", 1), ("b", None)]) == {"a": 1}
    assert without_added_nulls({"a": [1, None]}) == {"a": [1, None]}


PICTURE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}


@pytest.mark.parametrize(
    ("prompt", "columns", "sentence"),
    [
        (user([{"type": "text", "text": "See"}, PICTURE]), {}, "a part of type 'image_url'"),
        (user([{"type": "image"}]), {}, "a part of type 'image'"),
        (user([{"type": "text", "text": "a", "image": "b.png"}]), {}, "'image' beside its text"),
        (user([{"type": "input_audio", "input_audio": "x"}]), {}, "a part of type 'input_audio'"),
        (user([{"type": "text"}]), {}, "a part of type 'text'"),
        (user({"text": "2 + 3"}), {}, "the content {'text': '2 \\+ 3'}"),
        (user(5), {}, "the content 5"),
        (user("<image> What?"), {"images": ["b.png"]}, "has something under 'images'"),
        (user("What?"), {"video": "b.mp4"}, "has something under 'video'"),
        (
            [{"role": "developer", "content": "Be kind"}, *user("a")],
            {},
            "text 'Be kind' of its dev",
        ),
        ([{"role": "critic", "content": "No."}, *user("a")], {}, "of its critic message 0"),
        ([{"role": 3, "content": "No."}], {}, "the role 3"),
        (user("a\ud800b"), {}, r"'\\ud800', which is no character"),
        (user("a\ufdd0b"), {}, r"'\\ufdd0', which is no character"),
        (called({"a\udc00": 1}), {}, "is no character"),
    ],
)
def test_what_is_no_text_or_is_left_out_is_refused_with_its_row(
    tmp_path, prompt, columns, sentence
) -> None:
    with pytest.raises(ValueError, match=rf"rows.json row 0.*{sentence}"):
        prompts_of(tmp_path, prompt, suffix="json", **columns)


def test_empty_columns_of_pictures_are_none(tmp_path) -> None:
    assert prompts_of(tmp_path, user("a"), suffix="json", images=[], video=None)


@pytest.mark.parametrize(
    ("template", "messages", "is_refused"),
    [
        # A template without calls, and one whose tool messages are left out.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", called({"a": 1}), True),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", user("what"), True),
        ("{{ messages[-1].content }}", [{"role": "system", "content": "Be"}, *user("a")], True),
        ("{{ messages[0].content + 1 }}", user("a"), True),
        ("{{ messages[0].gone.gone }}", user("a"), True),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", user(" a \n"), False),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", user('a "b"\n'), False),
        # Every text has a place of its own.
        ("{{ messages[0].content }}", [*user("yes"), *user("yes")], True),
        (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
            [*user("a"), {"role": "assistant", "content": "<think>b</think>c"}, *user("d")],
            False,
        ),
    ],
)
def test_templates_that_lose_or_change_text_are_named(
    tmp_path, template, messages, is_refused
) -> None:
    tokenizer = make_tokenizer(template)
    if is_refused:
        with pytest.raises(ValueError, match=r"rows.json row 0: the chat template of"):
            prompts_of(tmp_path, messages, tokenizer=tokenizer, suffix="json")
    else:
        assert prompts_of(tmp_path, messages, tokenizer=tokenizer, suffix="json")


def test_characters_that_the_tokenizer_does_not_have_are_refused(tmp_path) -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}", letters="ab ")
    assert prompts_of(tmp_path, user("ab a"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"rows.parquet row 0: .* has no tokens for c, é of the"):
        prompts_of(tmp_path, user("abcé"), tokenizer=tokenizer)
    assert "é 漢 🙂" in prompts_of(tmp_path, user("é 漢 🙂"))[0]


def test_other_ways_of_a_row_to_a_prompt_lose_nothing_either() -> None:
    parts = user([{"type": "text", "text": "2 + 3?"}])
    tokenizer = make_tokenizer()
    columns = PromptCollator(DataConfig(max_prompt_length=64), tokenizer)([{"raw_prompt": parts}])
    assert "2 + 3?" in tokenizer.decode(columns["raw_prompt_ids"][0])
    with pytest.raises(ValueError, match="a row has in its user message 0 a part of type 'image'"):
        PromptCollator(DataConfig(), tokenizer)([{"raw_prompt": user([{"type": "image"}])}])
    assert DatasetRowEnvironment().reset(prompt=parts) == user("2 + 3?")


def test_keys_that_are_none_are_no_keys() -> None:
    message = {"role": "user", "content": "a", "name": None, "tool_calls": None}
    assert text_messages([message]) == user("a")
