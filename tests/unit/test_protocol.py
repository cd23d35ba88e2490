"""Tests DataProto: every method by hand on a few rows, its invariances, and its errors."""

import concurrent.futures
import copy
import pickle
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from data.array_ops import object_array
from data.protocol import (
    FIELDS,
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    pad_dataproto_to_divisor,
    union_tensor_dict,
    unpad_dataproto,
)


def make(rows: int = 4) -> DataProto:
    """Makes rows of x = [i, i + 0.5], name "r<i>", number 10 i, and a list of one length."""
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows)[:, None] + torch.tensor([0.0, 0.5])},
        non_tensors={
            "name": np.array([f"r{i}" for i in range(rows)], dtype=object),
            "number": np.arange(rows) * 10,
            "ids": [[i, i + 1] for i in range(rows)],
        },
        meta_info={"temperature": 0.7},
    )


def names(data: DataProto) -> list[str]:
    """Lists the row order, after checking that tensors and arrays moved together."""
    order = list(data.non_tensor_batch["name"])
    assert [f"r{int(x)}" for x in data.batch["x"][:, 0]] == order
    assert [f"r{int(n) // 10}" for n in data.non_tensor_batch["number"]] == order
    assert [f"r{ids[0]}" for ids in data.non_tensor_batch["ids"]] == order
    return order


def generated(rows: int = 3) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(rows, 2, dtype=torch.int64),
            "turn_ids": torch.zeros(rows, 2, dtype=torch.int64),
            "values": torch.rand(rows, 2),
        },
        non_tensors={
            "uid": [f"u{i}" for i in range(rows)],
            "episode_id": [f"e{i}" for i in range(rows)],
        },
    )


# --- Building and converting ---


def test_lists_of_one_length_stay_one_object_per_row():
    array = make().non_tensor_batch["ids"]
    assert array.shape == (4,) and array[1] == [1, 2]
    assert object_array([]).shape == (0,)


def test_from_single_dict_sorts_tensors_from_arrays():
    data = DataProto.from_single_dict(
        {"x": torch.zeros(2, 3), "name": np.array(["a", "b"], dtype=object)}
    )
    assert (
        set(data.batch.keys()) == {"x"}
        and set(data.non_tensor_batch) == {"name"}
        and len(data) == 2
    )
    assert DataProto.from_single_dict({"y": [1, 2]}).non_tensor_batch["y"].tolist() == [1, 2]


def test_rows_that_do_not_match_are_an_error_naming_the_fields():
    with pytest.raises(
        RuntimeError, match=r"batch_size=torch.Size\(\[2\]\) and value.shape=torch.Size\(\[3\]\)"
    ):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"needs 2 rows.*'name': \(3,\)"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, non_tensors={"name": ["x", "y", "z"]})


def test_length_comes_from_the_arrays_where_there_are_no_tensors():
    assert len(DataProto.from_dict(non_tensors={"name": ["a", "b"]})) == 2
    assert len(DataProto()) == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_to_tensordict_and_back_keeps_everything_under_slicing(rows):
    data = DataProto.from_dict(
        tensors={"x": torch.rand(rows, 2)},
        non_tensors={"same": [{"a": 1}] * rows, "ids": [[i] for i in range(rows)]},
        meta_info={"t": [1, 2]},
    )
    tensor_dict = data.to_tensordict()
    for back in (
        DataProto.from_tensordict(tensor_dict),
        DataProto.from_tensordict(tensor_dict[torch.arange(rows)]),
    ):
        assert torch.equal(back.batch["x"], data.batch["x"])
        assert back.non_tensor_batch["same"].tolist() == [{"a": 1}] * rows
        assert back.non_tensor_batch["ids"].tolist() == [[i] for i in range(rows)]
        assert back.meta_info == {"t": [1, 2]}


def test_saving_and_loading_gives_the_same_rows_and_dtypes(tmp_path):
    data = make(6)
    data.batch["half"] = torch.rand(6, 3).bfloat16()
    data.non_tensor_batch["reward_model"] = object_array(
        [{"ground_truth": np.float32(0.5), "n": None}] * 6
    )
    part = data[2:4]
    part.save_to_disk(tmp_path / "part.pt")
    loaded = DataProto.load_from_disk(tmp_path / "part.pt")
    assert names(loaded) == ["r2", "r3"]
    assert (
        torch.equal(loaded.batch["half"], part.batch["half"])
        and loaded.batch["half"].dtype == torch.bfloat16
    )
    assert loaded.non_tensor_batch["number"].dtype == part.non_tensor_batch["number"].dtype
    assert loaded.non_tensor_batch["reward_model"][0] == {"ground_truth": 0.5, "n": None}
    assert loaded.meta_info == {"temperature": 0.7}


def test_saving_without_tensors_keeps_batch_none(tmp_path):
    DataProto.from_dict(non_tensors={"name": ["a"]}).save_to_disk(tmp_path / "d.pt")
    assert DataProto.load_from_disk(tmp_path / "d.pt").batch is None


def test_saving_what_json_cannot_hold_names_the_field(tmp_path):
    data = DataProto.from_dict(non_tensors={"extra_info": [{"obj": object()}]})
    with pytest.raises(
        TypeError, match=r"non_tensor_batch\['extra_info'\] holds a object.*Convert or pop"
    ):
        data.save_to_disk(tmp_path / "d.pt")
    with pytest.raises(TypeError, match=r"meta_info\['m'\] holds a Tensor"):
        DataProto(meta_info={"m": torch.zeros(1)}).save_to_disk(tmp_path / "d.pt")


def test_a_file_with_code_in_it_is_not_loaded(tmp_path):
    torch.save({"tensors": None, "rows": make}, tmp_path / "d.pt")
    with pytest.raises(pickle.UnpicklingError):
        DataProto.load_from_disk(tmp_path / "d.pt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("rows", [0, 3])
def test_pickling_keeps_dtype_and_shape(dtype, rows):
    data = DataProto.from_dict(
        tensors={"x": torch.ones(rows, 2, 2, dtype=dtype)}, meta_info={"m": 1}
    )
    back = pickle.loads(pickle.dumps(data))
    assert torch.equal(back.batch["x"], data.batch["x"]) and back.batch["x"].dtype == dtype
    assert back.batch.batch_size == data.batch.batch_size and back.meta_info == {"m": 1}


@pytest.mark.parametrize("seed", range(40))
def test_pickling_gives_every_bit_back_whatever_lies_in_the_padding(seed):
    draw = torch.Generator().manual_seed(seed)
    rows, width = (int(n) for n in torch.randint(0, 9, (2,), generator=draw))
    width += 1
    starts, ends = (torch.randint(0, width + 1, (rows, 1), generator=draw) for _ in range(2))
    held = (torch.arange(width) >= starts) & (torch.arange(width) < ends)
    x = torch.where(
        held, torch.randn(rows, width, generator=draw), [0.0, -0.0, float("nan"), 7.0][seed % 4]
    )
    x[torch.rand(rows, width, generator=draw) < 0.1 * (seed % 3)] = -0.0
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int16,
        torch.int8,
        torch.bool,
        torch.complex128,
    )
    tensors = {str(dtype): x.to(dtype) for dtype in dtypes} | {
        "response_mask": held.to(torch.int8),
        "cube": x[:, :, None],
    }
    if seed % 2:
        tensors["attention_mask"] = torch.cat([held, held.flip(1)], dim=1).long()
    tensors["view"] = torch.randn(rows, 3 * width, generator=draw)[:, width : 2 * width]
    data = DataProto.from_dict(tensors=tensors).slice(int(rows > 3), None)
    back = pickle.loads(pickle.dumps(data))
    assert len(back) == len(data) and back.batch.keys() == data.batch.keys()
    for name, tensor in data.batch.items():
        other = back.batch[name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape
        assert (
            other.numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
            if tensor.dtype != torch.bfloat16
            else torch.equal(other.view(torch.int16), tensor.contiguous().view(torch.int16))
        )


def test_padding_is_not_pickled_and_full_rows_are_not_copied():
    tokens = torch.randint(1, 1000, (64, 1024), dtype=torch.int32)
    held = torch.arange(1024) < torch.randint(1, 200, (64, 1))
    left, right = (torch.where(mask, tokens, 0) for mask in (held.flip(1), held))
    mask = torch.cat([held.flip(1), held], dim=1).to(torch.int8)
    padded = DataProto.from_dict(
        tensors={"prompts": left, "responses": right, "attention_mask": mask}
    )
    assert len(pickle.dumps(padded)) < 2 * 5 * int(held.sum()) + 20_000
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(
        DataProto.from_dict(tensors={"x": tokens}), protocol=5, buffer_callback=buffers.append
    )
    assert np.frombuffer(buffers[0]).ctypes.data == tokens.data_ptr()


def test_a_chunk_pickles_and_saves_only_its_own_rows(tmp_path):
    whole = DataProto.from_dict(tensors={"x": torch.rand(1000, 100)})
    chunk = whole.chunk(10)[3]
    assert len(pickle.dumps(chunk)) < len(pickle.dumps(whole)) / 9
    chunk.save_to_disk(tmp_path / "c.pt")
    assert (tmp_path / "c.pt").stat().st_size < 50_000


def test_unpickling_from_read_only_buffers_gives_tensors_of_their_own():
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(make(), protocol=5, buffer_callback=buffers.append)
    frozen = [memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers]
    before = [bytes(buffer) for buffer in frozen]
    back = pickle.loads(payload, buffers=frozen)
    back.batch["x"] += 1
    assert (
        back.batch["x"][0].tolist() == [1.0, 1.5] and [bytes(buffer) for buffer in frozen] == before
    )


def test_a_deep_copy_shares_nothing():
    data = make()
    for copied in (copy.deepcopy(data), data.select(deepcopy=True)):
        copied.batch["x"] += 1
        copied.non_tensor_batch["ids"][0].append(9)
    assert data.batch["x"][0, 0] == 0 and data.non_tensor_batch["ids"][0] == [0, 1]


# --- meta_info ---


def test_changing_derived_meta_info_never_changes_the_original():
    data = make()
    derived = [
        data[:2],
        data[[0, 1]],
        data.select(["x"]),
        data.repeat(2),
        *data.chunk(2),
        *data.split(3),
        DataProto.concat([data, data]),
        data.unfold_column_chunks(2, ["x"]),
        next(data.make_iterator(2, 1)),
        DataProto(data.batch, data.non_tensor_batch, data.meta_info),
        data[0],
    ]
    for other in derived:
        other.meta_info["temperature"] = 99
        other.meta_info["new"] = 1
    assert data.meta_info == {"temperature": 0.7}


# --- Looking ---


def test_an_int_gives_one_row_and_collating_rows_gives_the_batch_back():
    data = make()
    item = data[-1]
    assert isinstance(item, DataProtoItem) and item.non_tensor_batch["name"] == "r3"
    assert item.batch["x"].tolist() == [3.0, 3.5]
    assert names(collate_fn([data[i] for i in (2, 0)])) == ["r2", "r0"]
    assert names(collate_fn(list(data))) == names(data)
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        data[4]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), ["r1", "r2"]),
        (slice(None, None, 2), ["r0", "r2"]),
        ([3, 0, 0], ["r3", "r0", "r0"]),
        (np.array([-1]), ["r3"]),
        (torch.tensor([2, 1]), ["r2", "r1"]),
        ([True, False, False, True], ["r0", "r3"]),
        (np.array([False, True, False, False]), ["r1"]),
        (torch.tensor([False, False, False, False]), []),
        ([], []),
        (range(2), ["r0", "r1"]),
    ],
)
def test_indexing_moves_tensors_and_arrays_together(index, expected):
    assert names(make()[index]) == expected


def test_a_mask_of_the_wrong_length_is_an_error():
    with pytest.raises(IndexError, match="size of axis is 4"):
        make()[[True, False]]


def test_slices_are_views_and_selected_rows_are_copies():
    data = make()
    assert data[1:].batch["x"].data_ptr() == data.batch["x"][1].data_ptr()
    data[[0, 1]].batch["x"].zero_()
    assert data.batch["x"][1, 1] == 1.5


def test_require_names_the_missing_field_and_its_writer():
    data = generated()
    data.require("values", "uid", by="update_critic")
    with pytest.raises(
        KeyError,
        match=r"update_policy needs 'old_log_probs' .*written by compute_log_prob.*turn_ids",
    ):
        data.require("values", "old_log_probs", by="update_policy")
    with pytest.raises(KeyError, match="not a field of FIELDS"):
        data.require("nonsense", by="me")


def test_a_key_in_the_other_part_is_said_to_be_there():
    data = DataProto.from_dict(
        tensors={"x": torch.zeros(2, 1)}, non_tensors={"state": ["a", "b"], "uid": ["p", "q"]}
    )
    data = data.union(DataProto.from_dict(tensors={"y": torch.ones(2)})).repeat(2)
    for made in (
        data,
        data[1:3],
        DataProto.concat([data, data]),
        pickle.loads(pickle.dumps(data)),
        data.select(),
    ):
        with pytest.raises(
            KeyError,
            match=r"no tensor 'state'; it has: x, y\. .* is in non_tensor_batch\['state'\]",
        ):
            made.batch["state"]
        with pytest.raises(
            KeyError, match=r"no 'x'; it has: state, uid\. Tensors are in batch\['x'\]"
        ):
            made.non_tensor_batch["x"]
    data.pop(non_tensor_batch_keys=["uid"])
    with pytest.raises(KeyError, match="no 'uid'; it has: state"):
        data.non_tensor_batch["uid"]


def test_every_row_shape_in_the_table_of_fields_is_one_of_five():
    assert {spec.shape for spec in FIELDS.values()} == {
        "(B,)",
        "(B,P)",
        "(B,R)",
        "(B,P+R)",
        "(B,P+R,layers,k)",
    }


def test_info_and_size_name_every_field(capsys):
    info = make().get_data_info()
    assert (
        "x: (4, 2) torch.float32 cpu" in info
        and "name: (4,) str" in info
        and "meta_info temperature" in info
    )
    DataProto.from_dict(tensors={"x": torch.zeros(1).expand(1024, 1024, 256)}).print_size("batch")
    assert capsys.readouterr().out == "batch 1024 rows, tensors 1.000 GiB, arrays 0.000 GiB\n"


# --- Columns ---


def test_select_means_all_for_none_and_nothing_for_an_empty_list():
    data = make()
    chosen = data.select(batch_keys=["x"], non_tensor_batch_keys=["name"], meta_info_keys=[])
    assert set(chosen.non_tensor_batch) == {"name"} and chosen.meta_info == {} and len(chosen) == 4
    assert set(data.select().non_tensor_batch) == {"name", "number", "ids"}
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 4
    with pytest.raises(KeyError, match=r"\['y'\] not in batch, which has: x"):
        data.select(batch_keys=["y"])


def test_pop_moves_fields_out():
    data = make()
    popped = data.pop(
        batch_keys=["x"], non_tensor_batch_keys=["ids"], meta_info_keys=["temperature"]
    )
    assert set(popped.batch.keys()) == {"x"} and set(popped.non_tensor_batch) == {"ids"}
    assert popped.meta_info == {"temperature": 0.7} and data.meta_info == {}
    assert (
        set(data.batch.keys()) == set()
        and set(data.non_tensor_batch) == {"name", "number"}
        and len(data) == 4
    )
    with pytest.raises(KeyError, match="'x'"):
        data.pop(batch_keys=["x"])


def test_a_failed_pop_takes_nothing():
    data = make()
    with pytest.raises(KeyError):
        data.pop(batch_keys=["x"], meta_info_keys=["missing"])
    assert "x" in data.batch


def test_rename_changes_names_in_place():
    data = make()
    assert data.rename("x", "y") is data
    assert data.batch["y"].shape == (4, 2) and "x" not in data.batch
    with pytest.raises(ValueError, match="argument 2 is longer"):
        data.rename(["y"], ["a", "b"])
    data.batch["z"] = torch.zeros(4)
    with pytest.raises(KeyError, match="z already present"):
        data.rename("y", "z")


def test_union_adds_fields_and_accepts_equal_shared_ones():
    data = make()
    other = data.select(deepcopy=True)
    data.batch["nan"] = torch.tensor([float("nan"), 1, 2, 3])
    other.batch["nan"] = data.batch["nan"].clone()
    other.batch["values"] = torch.zeros(4, 2)
    other.non_tensor_batch["deep"] = object_array([{"a": np.arange(2), "b": float("nan")}] * 4)
    again = copy.deepcopy(other)
    assert data.union(other) is data
    data.union(again).union(DataProto(meta_info={"temperature": np.float64(0.7)}))
    assert set(data.batch.keys()) == {"x", "nan", "values"} and "deep" in data.non_tensor_batch


@pytest.mark.parametrize("part", ["batch", "non_tensor_batch", "meta_info", "nested", "dtype"])
def test_union_refuses_a_shared_field_that_differs(part):
    data, other = make(), make()
    if part == "batch":
        other.batch["x"] = other.batch["x"] + 1
    elif part == "dtype":
        other.batch["x"] = other.batch["x"].double()
    elif part == "non_tensor_batch":
        other.non_tensor_batch["ids"][2] = [2, 2]
    elif part == "nested":
        data.non_tensor_batch["deep"] = object_array([{"a": np.array([1, 2])}] * 4)
        other.non_tensor_batch["deep"] = object_array([{"a": np.array([1, 3])}] * 4)
    else:
        other.meta_info["temperature"] = 1.0
    with pytest.raises(ValueError, match="differs between the two; pop or rename"):
        data.union(other)
    assert data.meta_info == {"temperature": 0.7}


def test_union_of_different_sizes_names_both():
    with pytest.raises(RuntimeError, match=r"\[4\].*\[2, 2\]"):
        union_tensor_dict(make().batch, make(2).rename("x", "y").batch)


# --- Rows ---


def test_repeat_interleaved_keeps_a_group_together():
    assert names(make(2).repeat(2)) == ["r0", "r0", "r1", "r1"]
    assert names(make(2).repeat(2, interleave=False)) == ["r0", "r1", "r0", "r1"]


def test_sample_level_repeat_repeats_each_row_its_own_number_of_times():
    assert names(make(3).sample_level_repeat([2, 0, 1])) == ["r0", "r0", "r2"]
    with pytest.raises(RuntimeError, match="repeats must have the same size"):
        make(3).sample_level_repeat([1, 2])


def test_reorder_and_its_inverse_restore_the_batch():
    data, order = make(), torch.tensor([2, 0, 3, 1])
    data.reorder(order)
    assert names(data) == ["r2", "r0", "r3", "r1"]
    data.reorder(order.argsort())
    assert names(data) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_concat_of_chunks_is_the_batch(chunks):
    data = make()
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [4 // chunks] * chunks
    assert names(DataProto.concat(parts)) == names(data)


def test_chunking_rows_that_do_not_divide_says_what_to_do():
    with pytest.raises(ValueError, match=r"4 rows do not divide into 3 .*pad_dataproto_to_divisor"):
        make().chunk(3)


def test_split_leaves_a_shorter_rest():
    assert [names(part) for part in make(3).split(2)] == [["r0", "r1"], ["r2"]]


def test_concat_gathers_metrics_and_refuses_other_differences():
    a, b = make(1), make(1)
    a.meta_info["metrics"] = {"loss": 1.0, "kl": [0.1, 0.2]}
    b.meta_info["metrics"] = {"loss": 2.0, "only_b": 3.0}
    merged = DataProto.concat([a, b]).meta_info
    assert merged == {
        "temperature": 0.7,
        "metrics": {"loss": [1.0, 2.0], "kl": [0.1, 0.2], "only_b": [3.0]},
    }
    assert a.meta_info["metrics"]["kl"] == [0.1, 0.2]
    b.meta_info["temperature"] = 1.0
    with pytest.raises(
        ValueError, match=r"meta_info\['temperature'\] differs between the parts: 0.7, 1.0"
    ):
        DataProto.concat([a, b])
    with pytest.raises(ValueError, match="part 1 and part 0 differ in"):
        DataProto.concat([a, b.select(["x"], ["name"])])
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])


def test_unfolding_columns_turns_pairs_into_neighbouring_rows():
    data = DataProto.from_dict(
        tensors={
            "pair": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
            "once": torch.tensor([[0, 1], [2, 3]]),
        },
        non_tensors={
            "name": ["a", "b"],
            "labels": np.array([["a0", "a1"], ["b0", "b1"]], dtype=object),
        },
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["pair", "labels"])
    assert unfolded.batch["pair"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert unfolded.batch["once"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert unfolded.non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert unfolded.non_tensor_batch["labels"].tolist() == [["a0"], ["a1"], ["b0"], ["b1"]]
    assert len(data.unfold_column_chunks(2)) == 4
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        data.unfold_column_chunks(3, split_keys=["once"])


def test_an_iterator_visits_every_row_once_per_epoch_in_a_reproducible_order():
    data = make(6)
    assert [names(part) for part in data.make_iterator(2, 1)] == [
        ["r0", "r1"],
        ["r2", "r3"],
        ["r4", "r5"],
    ]
    runs = [
        [n for part in data.make_iterator(2, 2, seed, {"shuffle": True}) for n in names(part)]
        for seed in (1, 1, 2)
    ]
    first, second = runs[0][:6], runs[0][6:]
    assert sorted(first) == sorted(second) == names(data) and first != second
    assert runs[0] == runs[1] != runs[2]


def test_an_iterator_reports_bad_arguments_when_it_is_made():
    with pytest.raises(ValueError, match="mini_batch_size=4 must divide the batch's 6 rows"):
        make(6).make_iterator(4, 1)


# --- Padding ---


def test_padding_appends_the_chosen_row_in_place():
    data = make(2)
    data.padding(2, "first")
    assert names(data) == ["r0", "r1", "r0", "r0"]
    assert names(make(2).padding(1)) == ["r0", "r1", "r1"]


@pytest.mark.parametrize(("rows", "divisor", "added"), [(4, 2, 0), (4, 3, 2), (2, 7, 5), (0, 3, 0)])
def test_padding_to_a_divisor_and_back_gives_the_same_rows(rows, divisor, added):
    padded, pad_size = pad_dataproto_to_divisor(make(rows), divisor)
    assert pad_size == added and len(padded) % divisor == 0
    assert names(padded)[rows:] == [f"r{i % rows}" for i in range(added)]
    assert names(unpad_dataproto(padded, pad_size)) == names(make(rows))


def test_dummies_are_copies_of_the_first_row_that_train_nothing():
    data = generated(3)
    data.batch["row_number"] = torch.tensor([40, 41, 42])
    padded = data.pad_with_dummies(4)
    assert padded.batch["row_number"].tolist() == [40, 41, 42, -1]
    assert len(padded) == 4 and padded.batch["response_mask"].sum(-1).tolist() == [2, 2, 2, 0]
    assert padded.batch["turn_ids"][3].tolist() == [-1, -1]
    assert torch.equal(padded.batch["values"][3], data.batch["values"][0])
    assert padded.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2", "dummy"]
    assert padded.non_tensor_batch["episode_id"][3] == "dummy"
    assert data.batch["response_mask"].all()
    whole = data.pad_with_dummies(3)
    assert len(whole) == 3 and whole.batch["values"].data_ptr() == data.batch["values"].data_ptr()


def test_dropping_dummies_keeps_a_real_row_of_empty_response():
    data = generated(3)
    data.batch["response_mask"][1] = 0
    dropped = data.pad_with_dummies(4).drop_dummies()
    assert dropped.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2"]
    assert torch.equal(dropped.batch["response_mask"], data.batch["response_mask"])


def test_dummies_work_with_numeric_uids():
    data = generated(3)
    data.non_tensor_batch["uid"] = np.array([0, 0, 1])
    padded = data.pad_with_dummies(2)
    assert padded.non_tensor_batch["uid"].tolist() == [0, 0, 1, "dummy"]
    assert len(padded.drop_dummies()) == 3 and len(data.drop_dummies()) == 3


# --- Futures ---


def test_a_future_joins_parts_and_hands_out_chunks_lazily():
    calls = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(lambda part=part: calls.append(1) or part) for part in make(4).chunk(2)
        ]
        future = DataProtoFuture.concat(futures)
        first, second = future.chunk(2)
        assert names(future.get()) == ["r0", "r1", "r2", "r3"]
        assert names(second.get()) == ["r2", "r3"] and names(first.chunk(2)[1].get()) == ["r1"]
    assert len(calls) == 2


def test_a_future_takes_its_own_way_to_resolve_and_can_be_pickled():
    store = {"ref": make(2)}
    assert len(DataProtoFuture.concat(["ref"], resolve=store.__getitem__).get()) == 2
    assert pickle.loads(pickle.dumps(DataProtoFuture.concat([]).chunk(2)[1])).parts == ((2, 1),)
    with pytest.raises(ValueError, match="at least one DataProto; given an empty list"):
        DataProtoFuture.concat([]).get()


# --- Size ---


def test_rows_are_moved_by_whole_tensor_operations():
    rows = 16_384
    data = DataProto.from_dict(
        tensors={"x": torch.zeros(rows, 64, dtype=torch.int32)},
        non_tensors={"uid": np.arange(rows).astype(object)},
    )
    started = time.process_time()
    data.reorder(torch.randperm(rows))
    DataProto.concat(data.repeat(2).chunk(64)).select_idxs(np.arange(0, rows, 3))
    assert time.process_time() - started < 2.0


# --- What verl's users know besides ---


def test_metrics_of_parts_are_dicts_or_lists_of_dicts() -> None:
    parts = [
        DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"metrics": metrics})
        for metrics in ({"loss": 1.0}, [{"loss": 2.0}, {"loss": 3.0}], {"loss": [4.0, 5.0]})
    ]
    assert DataProto.concat(parts).meta_info["metrics"] == {"loss": [1.0, 2.0, 3.0, 4.0, 5.0]}


def test_an_empty_one_has_no_rows() -> None:
    assert len(DataProto()) == len(DataProto(TensorDict({}, batch_size=[]))) == 0


def test_rows_fold_into_fewer_and_back() -> None:
    data = make(6)
    folded = data.fold_batch_dim(2)
    assert len(folded) == 2 and folded.batch["x"].shape == (2, 3, 2)
    assert folded.batch["x"][1, 0].tolist() == [3.0, 3.5]
    assert folded.non_tensor_batch["name"].tolist() == [["r0", "r1", "r2"], ["r3", "r4", "r5"]]
    assert folded.meta_info == data.meta_info
    back = folded.unfold_batch_dim()
    assert names(back) == names(data) and torch.equal(back.batch["x"], data.batch["x"])
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"6 rows do not fold into {size}"):
            data.fold_batch_dim(size)


def test_lists_of_a_column_are_cut_into_rows() -> None:
    data = DataProto.from_dict(
        tensors={"x": torch.arange(8).view(2, 4)},
        non_tensors={"pair": [["a", "b"], ["c", "d"]], "uid": ["u", "v"], "none": [[], []]},
    )
    rows = data.unfold_column_chunks(2, split_keys=["x", "pair", "none"])
    assert rows.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows.non_tensor_batch["pair"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert rows.non_tensor_batch["uid"].tolist() == ["u", "u", "v", "v"]
    assert rows.non_tensor_batch["none"].tolist() == [[], [], [], []]
    with pytest.raises(ValueError, match="a list of 2 in 'pair' does not divide into 4"):
        data.unfold_column_chunks(4, split_keys=["pair"])


def test_what_is_wrong_with_a_batch_is_caught_as_verls_users_do_and_as_ours() -> None:
    data = make(4)
    other = make(4)
    other.meta_info["temperature"] = 0.1
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match="do not divide into 3 equal chunks"):
            data.chunk(3)
        with pytest.raises(kind, match="must divide the batch's 4 rows"):
            data.make_iterator(3, epochs=1)
        with pytest.raises(kind, match="every field needs 2 rows"):
            DataProto.from_dict({"x": torch.zeros(2, 1)}, {"name": ["a"]})
        with pytest.raises(kind, match="temperature"):
            data.union(other)
        with pytest.raises(kind, match="temperature"):
            DataProto.concat([data, other])


def test_no_columns_may_be_none() -> None:
    batch = TensorDict({"x": torch.zeros(3, 1)}, batch_size=[3])
    data = DataProto(batch=batch, non_tensor_batch=None)
    assert len(data) == 3 and data.non_tensor_batch == {} and len(data.repeat(2)) == 6
