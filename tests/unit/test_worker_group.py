"""How a batch is split for the ranks of a group."""

from __future__ import annotations

import pytest
import torch

from data.protocol import DUMMY_UID, DataProto
from workers.ranks.dispatch import Dispatch, register, split_batch
from workers.ranks.local_group import LocalWorkerGroup


def batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "responses": torch.arange(rows * 3).view(rows, 3),
            "response_mask": torch.ones(rows, 3, dtype=torch.long),
            "position_ids": torch.zeros(rows, 5, dtype=torch.long),
        },
        non_tensors={
            "uid": [str(row) for row in range(rows)],
            "extra_info": [{"row": row} for row in range(rows)],
        },
        meta_info={"global_steps": 1},
    )


def test_chunks_are_views_of_what_is_read_and_uid() -> None:
    data = batch(4)
    chunks = split_batch(data, ("responses", "response_mask", "values"), 2)
    assert [set(chunk.batch.keys()) for chunk in chunks] == [{"responses", "response_mask"}] * 2
    assert [chunk.non_tensor_batch["uid"].tolist() for chunk in chunks] == [["0", "1"], ["2", "3"]]
    assert [set(chunk.non_tensor_batch) for chunk in chunks] == [{"uid"}] * 2
    assert chunks[1].meta_info == {"global_steps": 1}
    memory = data.batch["responses"].untyped_storage().data_ptr()
    assert all(chunk.batch["responses"].untyped_storage().data_ptr() == memory for chunk in chunks)


def test_a_call_that_names_no_fields_gets_all() -> None:
    chunks = split_batch(batch(4), (), 2)
    assert set(chunks[0].batch.keys()) == {"responses", "response_mask", "position_ids"}
    assert chunks[1].non_tensor_batch["extra_info"].tolist() == [{"row": 2}, {"row": 3}]


@pytest.mark.parametrize(
    ("rows", "chunks", "size"), [(4, 3, 2), (5, 3, 2), (3, 8, 1), (9, 8, 2), (4096, 24, 171)]
)
def test_rows_that_do_not_divide_are_filled_up_with_rows_without_sampled_tokens(
    rows: int, chunks: int, size: int
) -> None:
    parts = split_batch(batch(rows), ("responses", "response_mask"), chunks)
    assert [len(part) for part in parts] == [size] * chunks
    joined = DataProto.concat(parts)
    added = chunks * size - rows
    assert joined.batch["response_mask"].sum(dim=1).tolist() == [3] * rows + [0] * added
    assert (
        joined.non_tensor_batch["uid"].tolist()
        == [str(row) for row in range(rows)] + [DUMMY_UID] * added
    )
    assert torch.equal(joined.slice(0, rows).batch["responses"], batch(rows).batch["responses"])


def test_prompts_that_do_not_divide_are_repeated() -> None:
    prompts = DataProto.from_dict(tensors={"input_ids": torch.arange(3)[:, None]})
    assert DataProto.concat(split_batch(prompts, (), 2)).batch["input_ids"].flatten().tolist() == [
        0,
        1,
        2,
        2,
    ]


class Reader:
    """Returns what reached its methods."""

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("responses", "response_mask"))
    def fields(self, data: DataProto) -> set[str]:
        return {*data.batch.keys(), *data.non_tensor_batch, *data.meta_info}

    @register(Dispatch.DP_COMPUTE_PROTO, keeps_rows=False)
    def all_fields(self, data: DataProto) -> set[str]:
        return {*data.batch.keys(), *data.non_tensor_batch}

    @register(Dispatch.ALL_TO_ALL)
    def double(self, number: int) -> int:
        return 2 * number


def test_a_local_group_hands_over_what_the_ranks_of_ray_get() -> None:
    """A field that is read but not named must not work here and fail there."""
    group = LocalWorkerGroup(Reader())
    assert group.fields(batch(3)) == {"responses", "response_mask", "uid", "global_steps"}
    assert group.all_fields(batch(3)) == {
        "responses",
        "response_mask",
        "position_ids",
        "uid",
        "extra_info",
    }
    assert group.double([4]) == [8]
