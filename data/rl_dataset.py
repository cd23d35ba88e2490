"""Datasets of prompts: files of verl-form rows, and any PyTorch Dataset, as left-padded rows of equal length.

A row of a file: `{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 3 = ?"}],
"ability": "math", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 0}}`. Files are checked when they are
read, so that a bad row shows before a model is loaded, not hours later. The order of the rows is a pure function of
(seed, epoch), so that a resumed run continues inside an epoch.

Invariant: whatever Dataset a prompt comes from, `normalise_row` gives it its `input_ids`, `attention_mask` and
`position_ids` (max_prompt_length,) int64, padded on the left:

    tokens 7 8 9, length 5   ->   input_ids [0 0 7 8 9], attention_mask [0 0 1 1 1], position_ids [0 0 0 1 2]
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset

from data.containers import object_array, seed_for
from data.loading import load_extern_object
from data.texts import registered, say
from data.turn_tokens import Messages, Processor, Tokenizer, as_messages, encode_chat, pad_token_id

logger = logging.getLogger(__name__)
# The key under which a row says which file and line it comes from.
ORIGIN = "__origin__"
Files = str | Sequence[str]


class RLHFDataset(Dataset):
    """Reads prompts from parquet, json (a list of objects) or jsonl files, one or several.

    Args:
        data_files: a path or a list of paths.
        tokenizer: renders prompts by its chat template.
        config: the frozen `DataConfig`, or a mapping or OmegaConf with some of its settings; read are prompt_key,
            reward_fn_key, max_prompt_length, truncation, return_raw_chat, filter_overlong_prompts,
            filter_overlong_prompts_workers and apply_chat_template_kwargs.
        processor: kept for subclasses that read images; rows of text need none.
        max_samples: use the first rows only; -1 uses all.
        require_ground_truth: every row must have `reward_model.ground_truth` and the column config.reward_fn_key,
            which the rules that score it read.

    Rows are dicts of `input_ids`, `attention_mask`, `position_ids` (max_prompt_length,) int64, `raw_prompt_ids`,
    `index` (extra_info.index, or the row's number), `raw_prompt` if return_raw_chat, and every other column.
    With truncation=error, or filter_overlong_prompts, every prompt is tokenised once at construction.

    Raises:
        FileNotFoundError, ValueError: what is wrong with which file, line or row; rows count from 0.
    """

    def __init__(
        self,
        data_files: Files,
        tokenizer: Tokenizer,
        config: Any,
        processor: Processor = None,
        max_samples: int = -1,
        *,
        require_ground_truth: bool = True,
    ) -> None:
        if isinstance(config, Mapping):
            from training.config.settings import DataConfig

            # Its files are given beside it.
            config = DataConfig(
                **{k: config[k] for k in vars(DataConfig()) if k in config and "files" not in k}
            )
        self.tokenizer, self.config, self.processor = tokenizer, config, processor
        # Subclasses written for verl read them here.
        self.__dict__.update(vars(config), num_workers=config.filter_overlong_prompts_workers)
        self.data_files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self.max_samples, self.require_ground_truth = max_samples, require_ground_truth
        self.dataframe: Any = []
        self._read_files_and_tokenize()
        if not len(self.dataframe):
            raise ValueError(
                f"no rows are left of {', '.join(map(str, self.data_files))}; max_samples={max_samples}"
            )

    # Three hooks of verl's, for subclasses.

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe` to the rows: anything with a length whose [i] is a dict, such as a datasets.Dataset."""
        read = (
            (file, number, row)
            for file in self.data_files
            for number, row in enumerate(read_rows(file))
        )
        rows = [
            {"index": i, ORIGIN: f"{file} row {number}", **row}
            for i, (file, number, row) in enumerate(read)
        ]
        rows = rows[: self.max_samples] if self.max_samples >= 0 else rows
        self._check_rows(rows)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Returns the rows whose prompts fit; with `truncation=error` and no filter none may be too long."""
        rows = self.dataframe if dataframe is None else dataframe
        limit, config = self.config.max_prompt_length, self.config
        if not config.filter_overlong_prompts and config.truncation != "error":
            return rows
        with ThreadPoolExecutor(config.filter_overlong_prompts_workers) as pool:
            lengths = list(
                pool.map(lambda row: len(self._encode(self._build_messages(dict(row)))), rows)
            )
        overlong = [number for number, length in enumerate(lengths) if length > limit]
        if overlong and not config.filter_overlong_prompts:
            raise _overlong_error(_origin(rows[overlong[0]]), lengths[overlong[0]], limit)
        logger.info(
            "dropped %d of %d prompts longer than %d tokens", len(overlong), len(lengths), limit
        )
        return [row for row, length in zip(rows, lengths, strict=True) if length <= limit]

    def _build_messages(self, example: dict[str, Any]) -> Messages:
        """Returns a row's chat messages; may take columns out of the row, which is a copy."""
        return as_messages(example[self.prompt_key])

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        source, config = dict(self.dataframe[item]), self.config
        origin, messages, index = (
            _origin(source),
            self._build_messages(source),
            _entry(source, "extra_info", "index"),
        )
        row = {key: value for key, value in source.items() if key not in (self.prompt_key, ORIGIN)}
        row["index"] = row.get("index", item) if index is None else index
        if config.return_raw_chat:
            row["raw_prompt"] = messages
        token_ids = self._encode(messages)
        row |= {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)}
        limit, pad = config.max_prompt_length, pad_token_id(self.tokenizer)
        return normalise_row(
            row,
            max_prompt_length=limit,
            pad_token_id=pad,
            truncation=config.truncation,
            where=origin,
        )

    def _encode(self, messages: Messages) -> list[int]:
        return encode_chat(self.tokenizer, messages, **self.config.apply_chat_template_kwargs)

    def _check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        problems = [f"{_origin(row)} {fault}" for row in rows if (fault := self._fault_of(row))]
        if problems:
            shown = "; ".join(problems[:3]) + ("; …" if len(problems) > 3 else "")
            columns = sorted(rows[0].keys() - {ORIGIN})
            raise ValueError(
                say("bad_rows", bad=len(problems), rows=len(rows), shown=shown, columns=columns)
            )

    def _fault_of(self, row: Mapping[str, Any]) -> str | None:
        prompt_key, scoring_key = self.config.prompt_key, self.config.reward_fn_key
        prompt = row.get(prompt_key)
        if not (isinstance(prompt, str | list) and prompt):
            return f"has no prompt (a string or chat messages) under {prompt_key!r}"
        for message in prompt if isinstance(prompt, list) else ():
            told = message if isinstance(message, Mapping) else {}
            if not (
                told.get("role") and (told.get("content") is not None or told.get("tool_calls"))
            ):
                return f"has the message {message!r:.80}, without role or content"
        if not isinstance(row.get("extra_info") or {}, Mapping):
            return f"has extra_info={row['extra_info']!r:.80}, which must be a mapping"
        if self.require_ground_truth and _entry(row, "reward_model", "ground_truth") is None:
            return "has no reward_model.ground_truth"
        if self.require_ground_truth and not isinstance(row.get(scoring_key), str):
            return f"has no text under {scoring_key!r}, which chooses the scoring rule"
        return None


def _origin(row: Mapping[str, Any]) -> str:
    return str(row.get(ORIGIN, "a row"))


def _entry(row: Mapping[str, Any], column: str, key: str) -> Any:
    content = row.get(column)
    return content.get(key) if isinstance(content, Mapping) else None


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Reads all rows of a parquet, json or jsonl file as dicts; errors name the file and the line."""
    path = Path(file).expanduser()
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise ValueError(
            f"{file}: a data file ends in .parquet, .json, .jsonl; this one in {path.suffix!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"data file {str(file)!r} does not exist (looked for {path.resolve()})"
        )
    rows, where = [], str(path)
    try:
        if path.suffix == ".jsonl":
            # As bytes, because a decoder of the whole file does not know the line it fails in.
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                where = f"{path} line {number}"
                rows += [json.loads(line)] if line.strip() else []
        else:
            json_rows = path.suffix == ".json"
            rows = (
                json.loads(path.read_bytes())
                if json_rows
                else pyarrow.parquet.read_table(path).to_pylist()
            )
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} must hold rows, each an object: one a line in .jsonl, a list of them in .json"
        )
    return rows


def normalise_row(
    row: Mapping[str, Any],
    *,
    max_prompt_length: int,
    pad_token_id: int,
    truncation: str,
    where: str = "a row",
) -> dict[str, Any]:
    """Pads a row's prompt on the left to max_prompt_length tokens; all other keys travel unchanged.

    Args:
        row: `input_ids` and `attention_mask`, 1-D tensors or lists of any length, padded on any side; what the mask
            hides may be anything. That ids are of the vocabulary is not seen.
        truncation: "left" keeps the end, "right" the start, "middle" both ends, "error" raises.
        where: names the row in errors.
    Returns:
        the row with `input_ids`, `attention_mask`, `position_ids` (max_prompt_length,) int64, and
        `raw_prompt_ids`, the same tokens as a list without padding.
    Raises: ValueError for a row that lacks the two, has other shapes, or no tokens.
    """
    token_ids = truncate(_real_tokens(row, where), max_prompt_length, truncation, where)
    missing = max_prompt_length - len(token_ids)
    tokens = {
        "input_ids": torch.tensor([pad_token_id] * missing + token_ids),
        "raw_prompt_ids": token_ids,
    }
    positions = torch.arange(-missing, len(token_ids))
    return {
        **row,
        **tokens,
        "attention_mask": (positions >= 0).long(),
        "position_ids": positions.clamp(min=0),
    }


def _real_tokens(row: Mapping[str, Any], where: str) -> list[int]:
    if missing := {"input_ids", "attention_mask"} - row.keys():
        raise ValueError(say("no_tokens", where=where, missing=sorted(missing)))
    input_ids, mask = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["attention_mask"])
    if input_ids.ndim != 1 or input_ids.shape != mask.shape:
        raise ValueError(
            say("two_shapes", where=where, ids=tuple(input_ids.shape), mask=tuple(mask.shape))
        )
    if not mask.any():
        raise ValueError(f"{where}: the prompt has no tokens; its attention_mask is all zero")
    return input_ids.long()[mask.bool()].tolist()


def truncate(token_ids: list[int], max_length: int, truncation: str, where: str) -> list[int]:
    """Cuts the tokens to max_length where they are more; see `normalise_row`."""
    excess = len(token_ids) - max_length
    if excess <= 0:
        return token_ids
    kept_ahead = {"left": 0, "right": max_length, "middle": max_length // 2, "error": None}
    start = registered(kept_ahead, "data.truncation", truncation)
    if start is None:
        raise _overlong_error(where, len(token_ids), max_length)
    return token_ids[:start] + token_ids[start + excess :]


def _overlong_error(where: str, length: int, limit: int) -> ValueError:
    return ValueError(say("overlong_prompt", where=where, length=length, limit=limit))


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Turns rows into columns: tensors are stacked to (B, …), all else becomes a 1-D object array of B entries.

    A key that some rows lack is None there. Raises torch's error where a tensor is lacking or of another shape.
    """
    keys = dict.fromkeys(key for row in data_list for key in row)
    columns = {key: [row.get(key) for row in data_list] for key in keys}
    return {
        key: torch.stack(column)
        if any(isinstance(entry, Tensor) for entry in column)
        else object_array(column)
        for key, column in columns.items()
    }


def create_dataset(
    data_files: Files,
    data_config: Any,
    tokenizer: Tokenizer,
    processor: Processor = None,
    max_samples: int = -1,
) -> Dataset:
    """Makes the Dataset of `data.custom_cls.path` and `.name` where a path is set, else an RLHFDataset.

    A custom class is built with RLHFDataset's first four arguments, by keyword; max_samples then takes a Subset.
    """
    custom = data_config.custom_cls
    if custom.path is None:
        return RLHFDataset(data_files, tokenizer, data_config, processor, max_samples=max_samples)
    dataset_cls = load_extern_object(custom.path, custom.name)
    if not (isinstance(dataset_cls, type) and issubclass(dataset_cls, Dataset)):
        raise TypeError(
            f"data.custom_cls: {custom.name} of {custom.path} must subclass torch.utils.data.Dataset"
        )
    dataset = dataset_cls(
        data_files=data_files, tokenizer=tokenizer, config=data_config, processor=processor
    )
    return Subset(dataset, range(max_samples)) if 0 <= max_samples < len(dataset) else dataset


class EpochOrder(Sampler[int]):
    """Yields the row numbers of one epoch, from a place inside it.

    Args:
        dataset: whose rows are meant, a map-style one.
        seed: the run's seed.
        shuffle: a new permutation every epoch; otherwise ascending.
        inner: a sampler of the user's, whose order is taken instead.
    """

    def __init__(
        self, dataset: Any, seed: int, shuffle: bool, inner: Sampler[int] | None = None
    ) -> None:
        self.num_rows, self.seed, self.shuffle, self.inner = len(dataset), seed, shuffle, inner
        self.start(epoch=0, skip=0)

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration give `epoch`'s order without its first `skip` rows."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self) -> Iterator[int]:
        return iter(self._order()[self.skip :])

    def __len__(self) -> int:
        return (len(self.inner) if isinstance(self.inner, Sized) else self.num_rows) - self.skip

    def _order(self) -> Sequence[int]:
        if self.inner is not None:
            # torch's own samplers draw from the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_for(self.seed, 0, self.epoch))
                return list(self.inner)
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(seed_for(self.seed, 0, self.epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


@dataclass(frozen=True)
class PromptCollator:
    """Collates rows of any torch Dataset that gives `input_ids` and `attention_mask` (see `normalise_row`).

    A row without them is tokenised here: `raw_prompt`, or `data.prompt_key`, holds chat messages, or one user message
    as a string.

    Args:
        config: the `DataConfig`.
        collate: makes columns of normalised rows.
    """

    config: Any
    tokenizer: Tokenizer
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = collate_fn

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        columns = self.collate([self._normalised(row) for row in rows])
        return {
            key: object_array(column) if isinstance(column, list) else column
            for key, column in columns.items()
        }

    def _normalised(self, row: dict[str, Any]) -> dict[str, Any]:
        data = self.config
        key = "raw_prompt" if "raw_prompt" in row else data.prompt_key
        if "input_ids" not in row and key in row:
            ids = encode_chat(self.tokenizer, row[key], **data.apply_chat_template_kwargs)
            row = {**row, "input_ids": ids, "attention_mask": [1] * len(ids)}
        pad, limit = pad_token_id(self.tokenizer), data.max_prompt_length
        return normalise_row(
            row, max_prompt_length=limit, pad_token_id=pad, truncation=data.truncation
        )
