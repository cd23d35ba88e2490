"""Rows of validation that are rows of training are told."""

from __future__ import annotations

from typing import Any

import pytest

from data.shared_rows import warn_of_shared_rows


def row(number: int, text: str, **columns: Any) -> dict[str, Any]:
    return {"index": number, "prompt": [{"role": "user", "content": text}], **columns}


def said(train: Any, val: Any, caplog: pytest.LogCaptureFixture) -> str:
    warn_of_shared_rows(train, val, "prompt")
    return caplog.text


def test_rows_that_ask_the_same_are_counted_wherever_they_stand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train = [row(0, "a"), row(1, "b", data_source="x")]
    val = [row(0, "b", data_source="y"), row(1, "c"), row(2, "a")]
    assert "2 of 3 rows of data.val_files" in said(train, val, caplog)


def test_tasks_without_a_prompt_are_compared_by_their_columns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train = [{"index": 0, "secret": 3}, {"index": 1, "secret": 4}]
    assert "1 of 2 rows" in said(train, [{"index": 0, "secret": 4}, {"secret": 5}], caplog)


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ([row(0, "a")], [row(0, "b")]),
        (range(4), range(4)),
        (object(), [row(0, "a")]),
        ([row(0, "a")], None),
    ],
)
def test_other_rows_and_datasets_that_list_none_are_passed_over(
    train: Any, val: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(train, val, caplog) == ""
