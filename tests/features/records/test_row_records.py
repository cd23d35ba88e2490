"""Rows as the episode files hold them: all rows' tokens at once, against token by token."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from data.packed_arrays import pack_array, pack_parts, unpack_array
from features.records.episode_records import encode_record, episode_facts, episode_records
from features.records.row_records import complete_rows, row_records
from features.records.token_origins import ENVIRONMENT, OVER_LIMIT, SAMPLED, TEMPLATE, RowOrigins
from workers.rollout.engine import Completion, VersionSpan
from workers.rollout.episode import Episode, Row

ORIGINS = (SAMPLED, ENVIRONMENT, TEMPLATE, OVER_LIMIT)


def sampled(ids: list[int], *versions: VersionSpan) -> Completion:
    return Completion(
        request_id="0",
        token_ids=ids,
        log_probs=[-0.25 * number for number in ids],
        finish_reason="stop",
        versions=versions,
    )


def random_row(draw: random.Random) -> Row:
    """A row of up to four turns, some of them empty or of two versions, maybe without any."""
    row = Row(prompt_ids=[draw.randrange(9) for _ in range(draw.randrange(4))])
    if draw.random() < 0.3:
        row.append_tokens([7] * draw.randrange(3))
    for turn in range(draw.randrange(5)):
        ids = [draw.randrange(1, 99) for _ in range(draw.randrange(4))]
        versions = ()
        if len(ids) > 1 and draw.random() < 0.4:
            versions = (VersionSpan(turn, 0, 1), VersionSpan(turn + 1, 1, len(ids)))
        row.append_sampled(sampled(ids, *versions), turn)
        row.append_tokens([8] * draw.randrange(3))
    if row.spans:
        row.reward_at = {row.spans[-1].end - 1: draw.random(), row.spans[0].start: -1.5}
    return row


def expected(row: Row, origins: RowOrigins | None) -> dict[str, list[Any] | None]:
    """What is recorded of a row, token by token."""
    size = len(row.ids)
    turn_of = {}
    version_of = {}
    for span in row.spans:
        for place in range(span.start, span.end):
            turn_of[place] = span.turn
            version_of[place] = span.version
    record: dict[str, list[Any] | None] = {
        "prompt_ids": row.prompt_ids,
        "response_ids": list(row.ids),
        "response_mask": [int(place in turn_of) for place in range(size)],
        "log_probs": list(row.log_probs),
        "turn_ids": [turn_of.get(place, -1) for place in range(size)],
        "rewards": [float(np.float32(row.reward_at.get(place, 0))) for place in range(size)],
        "template_mask": None,
    }
    if origins is not None and origins.is_told:
        record["template_mask"] = [int(o in (TEMPLATE, OVER_LIMIT)) for o in origins.origins]
    if len(set(version_of.values())) > 1:
        record["weight_versions"] = [version_of.get(place, -1) for place in range(size)]
    return record


def as_lists(record: dict[str, Any]) -> dict[str, list[Any] | None]:
    return {
        name: None if value is None else unpack_array(value, "").tolist()
        for name, value in record.items()
    }


def test_rows_together_are_recorded_as_token_by_token() -> None:
    draw = random.Random(5)
    rows = [random_row(draw) for _ in range(200)]
    origins: list[RowOrigins | None] = []
    for number, row in enumerate(rows):
        told = RowOrigins(bytes(draw.choice(ORIGINS) for _ in row.ids), is_told=number % 5 > 0)
        origins.append(None if number % 7 == 0 else told)
    assert any(not row.spans for row in rows) and any(not row.ids for row in rows)
    records = list(row_records(rows))
    for record, row, of_row in zip(records, rows, origins, strict=True):
        episode = Episode(group=0, sample=0, rows=[row])
        complete_rows([record], episode, [] if of_row is None else [of_row])
        assert record.pop("parent") is None
    assert [as_lists(record) for record in records] == [
        expected(row, of_row) for row, of_row in zip(rows, origins, strict=True)
    ]
    assert sum("weight_versions" in record for record in records) > 20


def test_no_rows_and_rows_of_nothing_are_recorded_too() -> None:
    assert list(row_records([])) == []
    [record] = row_records([Row(prompt_ids=[])])
    assert set(map(str, as_lists(record).values())) == {"[]", "None"}


def test_parts_are_packed_as_each_alone() -> None:
    numbers = np.arange(6)
    parts = list(pack_parts(numbers, "<i2", [2, 0, 4]))
    assert parts == [pack_array(part, "<i2") for part in (numbers[:2], [], numbers[2:])]


def test_records_of_episodes_keep_their_own_rows() -> None:
    draw = random.Random(6)
    episodes = []
    for group, count in enumerate((2, 0, 1, 3)):
        rows = [random_row(draw) for _ in range(count)]
        episodes.append(Episode(group=group, sample=0, rows=rows))
    for episode, record in zip(episodes, episode_records(episodes), strict=True):
        ids = [unpack_array(row["response_ids"], "").tolist() for row in record["rows"]]
        assert ids == [list(row.ids) for row in episode.rows]
        assert all("parent" in row for row in record["rows"])


def test_a_task_that_json_cannot_hold_costs_its_record_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endless: dict[str, Any] = {}
    endless["itself"] = endless

    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("nothing to say")

    tasks: list[dict[str, Any]] = [endless, {"object": Silent()}, {"said": "\ud800"}]
    episodes = [Episode(group=0, sample=0, task=task) for task in tasks]
    first, second, third = (
        encode_record(episode_facts(episode), record)
        for episode, record in zip(episodes, episode_records(episodes), strict=True)
    )
    assert first is None and second is None
    assert third is not None and json.loads(third)["task"] == {"said": "\ud800"}
    assert "not recorded, the run goes on: RuntimeError: nothing to say" in caplog.text


def test_a_failure_policy_takes_nothing_from_the_record() -> None:
    row = Row(prompt_ids=[1])
    row.append_sampled(sampled([4, 5]), 0)
    row.reward_at = {1: 0.5}
    records = row_records([row])
    row.spans, row.reward_at = [], {}
    [record] = records
    assert unpack_array(record["turn_ids"], "").tolist() == [0, 0]
    assert unpack_array(record["rewards"], "").tolist() == [0, 0.5]
