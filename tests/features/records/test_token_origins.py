"""Which tokens of a response the chat template added, and which are the environment's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.packed_arrays import pack_array, unpack_array
from data.turn_tokens import CHATML_TEMPLATE, TurnTokens
from features.records.episode_records import episode_records
from features.records.row_records import parents_of
from features.records.token_origins import (
    ENVIRONMENT,
    OVER_LIMIT,
    SAMPLED,
    TEMPLATE,
    TokenOrigins,
)
from tests.unit.test_episode import sampler
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion
from workers.rollout.episode import Episode, Row, TurnLimits
from workers.rollout.episode_play import play_episode

LIMITS = TurnLimits(prompt_length=200, response_length=900, max_model_len=1100, max_turn=9)


@pytest.fixture(scope="module")
def tokens(tiny_task: Path) -> TurnTokens:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])


def characters() -> TurnTokens:
    """A tokenizer of single characters, which joins a newline with a letter behind it."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz .:-_") | {"\n", "\na", "<", ">", "|"})
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [("\n", "a")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[end])


def play(tokens: TurnTokens, *turns: tuple[str, str, list[str]]) -> Episode:
    """Plays turns: the policy's text, how it finished, the texts that answer it."""
    episode = Episode(group=0, sample=0)
    game = play_episode(episode, sampler, LIMITS, tokens, [None])
    game.send(None)
    game.send(StepReply(messages=[{"role": "user", "content": "begin"}]))
    for text, finish, answers in turns:
        ids = tokens.tokenizer.encode(text, add_special_tokens=False)
        ids += list(tokens.eos_token_ids) if finish == "stop" else []
        sampled = completion_of(ids, finish)
        game.send(sampled)
        game.send(StepReply(messages=[{"role": "user", "content": a} for a in answers]))
    return episode


def completion_of(ids: list[int], finish: Any) -> Any:
    return Completion(
        request_id="0", token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason=finish
    )


def pieces(tokens: TurnTokens, episode: Episode, origin: int) -> str:
    [row] = TokenOrigins(tokens).of_episode(episode)
    ids = np.array(episode.row.ids)[np.frombuffer(row.origins, np.int8) == origin]
    return tokens.tokenizer.decode(ids.tolist())


def test_the_templates_tokens_are_told_from_the_environments(tokens: TurnTokens) -> None:
    episode = play(tokens, ("guess 5", "stop", ["higher"]), ("guess 7", "stop", ["7 lower"]))
    [row] = TokenOrigins(tokens).of_episode(episode)
    assert row.is_told
    assert pieces(tokens, episode, ENVIRONMENT).split() == ["higher", "7", "lower"]
    assert [value for value in row.origins if value == SAMPLED] == [SAMPLED] * 6
    assert OVER_LIMIT not in row.origins
    # The policy's last words are its own.
    assert row.origins[2] == SAMPLED and row.origins[3] == TEMPLATE
    [record] = episode_records([episode], [[row]])
    mask = unpack_array(record["rows"][0]["template_mask"], "|i1")
    assert np.array_equal(mask == 1, np.frombuffer(row.origins, np.int8) == TEMPLATE)


def test_the_end_that_closes_a_cut_turn_is_over_the_limit(tokens: TurnTokens) -> None:
    episode = play(tokens, ("guess 5", "length", ["higher"]), ("5", "stop", ["lower"]))
    [row] = TokenOrigins(tokens).of_episode(episode)
    assert list(row.origins[:4]) == [SAMPLED, SAMPLED, OVER_LIMIT, TEMPLATE]
    assert row.origins.count(OVER_LIMIT) == 1


def test_a_token_that_joins_the_template_with_a_text_is_the_environments() -> None:
    tokens = characters()
    episode = play(tokens, ("no", "stop", ["abc. a"]), ("so", "stop", ["dog"]))
    [row] = TokenOrigins(tokens).of_episode(episode)
    assert row.is_told
    assert pieces(tokens, episode, ENVIRONMENT) == "\nabc. adog"


def test_several_messages_and_an_empty_one_are_found_in_turn(tokens: TurnTokens) -> None:
    episode = play(tokens, ("5", "stop", ["higher", "", "lower 3"]), ("5", "stop", ["7"]))
    assert pieces(tokens, episode, ENVIRONMENT).split() == ["higher", "lower", "3", "7"]


def test_a_long_text_is_found_by_its_ends(tokens: TurnTokens) -> None:
    long = " ".join(["higher 3 4", *["lower correct 5"] * 100, "7 guess"])
    for text in (long, f"\n {long}\n"):
        episode = play(tokens, ("5", "stop", [text]), ("5", "stop", ["7"]))
        assert pieces(tokens, episode, ENVIRONMENT).split() == [*long.split(), "7"]


def test_a_row_whose_template_cannot_be_told_says_so(tokens: TurnTokens) -> None:
    episode = play(tokens, ("5", "stop", ["higher"]), ("7", "stop", ["lower"]))
    reply = episode.turns[0].reply
    assert reply is not None
    reply.messages[0]["content"] = "correct 1 2 3"
    [row] = TokenOrigins(tokens).of_episode(episode)
    assert not row.is_told
    assert TEMPLATE in row.origins, "the second answer is told"
    [record] = episode_records([episode], [[row]])
    assert record["rows"][0]["template_mask"] is None


def test_a_row_that_begins_with_anothers_ids_names_it() -> None:
    first = Row(prompt_ids=[1, 2, 3])
    first.append_tokens([4, 5, 6])
    rewritten = Row(prompt_ids=[1, 2, 3, 4, 9])
    other = Row(prompt_ids=[7])
    branch = Row(prompt_ids=[1, 2, 3, 4, 9, 9])
    assert parents_of([first, rewritten, other, branch]) == [
        None,
        {"row": 0, "tokens": 4},
        None,
        {"row": 1, "tokens": 5},
    ]


def test_an_attempt_that_failed_is_kept_beside_the_one_that_counts(tokens: TurnTokens) -> None:
    episode = play(tokens, ("5", "stop", ["higher"]))
    episode.ending, episode.error = "env_crash", "boom"
    episode.restart()
    assert episode.rows == [] and episode.turns == []
    [record] = episode_records([episode])
    [attempt] = record["failed_attempts"]
    assert attempt["ending"] == "env_crash" and attempt["error"] == "boom"
    [turn] = attempt["turns"]
    assert turn["text"] == "5" and turn["observation"][0]["content"] == "higher"


def test_arrays_come_back_bit_for_bit_and_lists_are_read_too() -> None:
    numbers = np.array([-0.5, np.nan, -np.inf, 1e-42], np.float32)
    back = unpack_array(pack_array(numbers, "<f4"), "<f4")
    assert back.tobytes() == numbers.tobytes()
    assert np.isnan(unpack_array([1.0, None], "<f4")[1])
    assert unpack_array([3, 4], "<i4").dtype == np.int32
    with pytest.raises(ValueError, match="dtype 'object'"):
        unpack_array({"dtype": "object", "base64": ""}, "<i4")
    with pytest.raises(ValueError, match="no packed array"):
        unpack_array({"dtype": "<i4", "base64": "%%"}, "<i4")
