"""Makes a Dataset of prompts, from files of verl-form rows or from a class of the user's.

Files are checked when they are read, so that a bad row shows before a model is loaded, not hours
later. How a row is padded is in prompt_rows.py, which files there are in prompt_files.py, the order
of the rows in epoch_order.py.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from data.chat_templates import Messages, Processor, Tokenizer, pad_token_id
from data.epoch_order import EpochOrder as EpochOrder
from data.loading import load_extern_object
from data.prompt_files import read_rows as read_rows
from data.prompt_messages import (
    encode_prompt,
    media_column,
    text_messages,
    without_added_nulls,
)
from data.prompt_rows import PromptCollator as PromptCollator
from data.prompt_rows import collate_fn as collate_fn
from data.prompt_rows import normalise_row as normalise_row
from data.prompt_rows import overlong_error
from data.prompt_rows import truncate as truncate
from data.watchdog import beat

logger = logging.getLogger(__name__)
# The key under which a row says which file and line it comes from.
ORIGIN = "__origin__"
# Stands for a dataset that makes its rows itself and says no number.
ROWS_WITHOUT_FILES = 1000
# Bad rows that an error shows.
MOST_SHOWN = 3
Files = str | Sequence[str]


class RLHFDataset(Dataset):
    """Reads prompts from parquet, json (a list of objects) or jsonl files, one or several.

    Args:
        data_files: a path or a list of paths.
        tokenizer: renders prompts by its chat template.
        config: the frozen `DataConfig`, or a mapping or OmegaConf with some of its settings; read
            are prompt_key, reward_fn_key, max_prompt_length, truncation, return_raw_chat,
            filter_overlong_prompts, filter_overlong_prompts_workers and
            apply_chat_template_kwargs.
        data_files, tokenizer, config: None for a subclass that has its own `__getitem__`; without
            files it has `num_rows` rows, unless it has a `__len__`, too.
        processor: kept for subclasses that read images; rows of text need none.
        max_samples: use the first rows only; -1 uses all.
        require_ground_truth: every row must have `reward_model.ground_truth` and the column
            config.reward_fn_key, which the rules that score it read.
        tokenizer_kwargs: kept for subclasses that call the tokenizer themselves.

    Rows are dicts of `input_ids`, `attention_mask`, `position_ids` (max_prompt_length,) int64,
    `raw_prompt_ids`, `index` (extra_info.index, or the row's number), `raw_prompt` if
    return_raw_chat, and every other column. With truncation=error, or filter_overlong_prompts,
    every prompt is tokenised once at construction.

    Raises:
        FileNotFoundError, ValueError: what is wrong with which file, line or row; rows count from
            0.
    """

    def __init__(
        self,
        data_files: Files | None = None,
        tokenizer: Any = None,
        config: Any = None,
        processor: Processor = None,
        max_samples: int = -1,
        *,
        require_ground_truth: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        num_rows: int = ROWS_WITHOUT_FILES,
    ) -> None:
        makes_rows = type(self).__getitem__ is not RLHFDataset.__getitem__
        if data_files is None and not makes_rows:
            raise ValueError(
                f"{type(self).__name__} needs data_files, tokenizer and config; a subclass that "
                "makes its rows itself, by a __getitem__ of its own, needs no files"
            )
        if config is None or isinstance(config, Mapping):
            config = _as_data_config(config or {})
        self.tokenizer_kwargs: Mapping[str, Any] = dict(tokenizer_kwargs or {})
        self.tokenizer: Tokenizer = tokenizer
        self.config = config
        self.processor = processor
        # Subclasses written for verl read them here.
        self.__dict__.update(vars(config), num_workers=config.filter_overlong_prompts_workers)
        if isinstance(data_files, str | Path):
            self.data_files = [data_files]
        else:
            self.data_files = list(data_files or [])
        self.max_samples = max_samples
        self.require_ground_truth = require_ground_truth
        self.dataframe: Any = range(num_rows)
        if makes_rows and not self.data_files:
            return
        self._read_files_and_tokenize()
        if len(self.dataframe) == 0:
            files = ", ".join(map(str, self.data_files))
            raise ValueError(f"no rows are left of {files}; max_samples={max_samples}")

    # Three hooks of verl's, for subclasses.

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe` to the rows.

        That is anything with a length whose [i] is a dict, such as a datasets.Dataset.
        """
        rows: list[dict[str, Any]] = []
        for file in self.data_files:
            is_table = Path(file).suffix == ".parquet"
            for number, row in enumerate(read_rows(file)):
                if is_table and self.prompt_key in row:
                    row[self.prompt_key] = without_added_nulls(row[self.prompt_key])
                rows.append({"index": len(rows), ORIGIN: f"{file} row {number}", **row})
        if self.max_samples >= 0:
            rows = rows[: self.max_samples]
        self._check_rows(rows)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Returns the rows whose prompts fit.

        With `truncation=error` and no filter none may be too long.
        """
        rows = self.dataframe if dataframe is None else dataframe
        config = self.config
        if not measures_prompts(config):
            return rows
        with ThreadPoolExecutor(config.filter_overlong_prompts_workers) as pool:
            lengths = list(pool.map(self._prompt_length, rows))
        return keep_fitting(rows, lengths, [_origin(row) for row in rows], config)

    def _build_messages(self, example: dict[str, Any]) -> Messages:
        """Returns a row's chat messages; may take columns out of the row, which is a copy."""
        return text_messages(example[self.prompt_key])

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        config = self.config
        source = dict(self.dataframe[item])
        origin = _origin(source)
        messages = self._build_messages(source)
        row = dict(source)
        row.pop(config.prompt_key, None)
        row.pop(ORIGIN, None)
        index = _entry(source, "extra_info", "index")
        if index is None:
            index = row.get("index", item)
        row["index"] = index
        if config.return_raw_chat:
            row["raw_prompt"] = messages
        token_ids = self._encode(messages, origin)
        row["input_ids"] = token_ids
        row["attention_mask"] = [1] * len(token_ids)
        return normalise_row(
            row,
            max_prompt_length=config.max_prompt_length,
            pad_token_id=pad_token_id(self.tokenizer),
            truncation=config.truncation,
            where=origin,
        )

    def _encode(self, messages: Messages, where: str) -> list[int]:
        variables = self.config.apply_chat_template_kwargs
        return encode_prompt(self.tokenizer, messages, where, **variables)

    def _prompt_length(self, row: Mapping[str, Any]) -> int:
        beat("a prompt read")
        return len(self._encode(self._build_messages(dict(row)), _origin(row)))

    def _check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError with the first rows that cannot be used, and their faults."""
        rows_with: dict[str, list[str]] = {}
        for row in rows:
            fault = self._fault_of(row)
            if fault is not None:
                rows_with.setdefault(fault, []).append(_origin(row))
        if not rows_with:
            return
        num_bad = sum(map(len, rows_with.values()))
        sentences = []
        for fault, origins in list(rows_with.items())[:MOST_SHOWN]:
            others = f" (so have {len(origins) - 1} more)" if len(origins) > 1 else ""
            sentences.append(f"{origins[0]} {fault}{others}")
        shown = "; ".join(sentences)
        if len(rows_with) > MOST_SHOWN:
            shown += "; …"
        columns = sorted(rows[0].keys() - {ORIGIN})
        raise ValueError(
            f"{num_bad} of {len(rows)} rows cannot be used: {shown}. Their columns are "
            f"{columns}; data.prompt_key names the prompt's, data.reward_fn_key the scoring rule's"
        )

    def _fault_of(self, row: Mapping[str, Any]) -> str | None:
        """Describes what is wrong with a row; None where nothing is."""
        prompt_key = self.config.prompt_key
        scoring_key = self.config.reward_fn_key
        prompt = row.get(prompt_key)
        if isinstance(prompt, Mapping):
            return f"has one message under {prompt_key!r}; chat messages are a list of them"
        if not isinstance(prompt, str | list) or not prompt:
            return f"has no prompt (a string or chat messages) under {prompt_key!r}"
        if isinstance(prompt, str) and _is_written_messages(prompt):
            return f"has chat messages as text under {prompt_key!r}; store them as a list"
        if isinstance(prompt, list):
            for message in prompt:
                if not _is_message(message):
                    return (
                        f"has the message {message!r:.80}, without role or content; a message is "
                        "{'role': …, 'content': …}"
                    )
        # A class that makes the messages itself may read anything.
        if type(self)._build_messages is RLHFDataset._build_messages:
            media = media_column(row)
            if media is not None:
                return (
                    f"has something under {media!r}, and prompts are text here: take the column "
                    "out, or read it in a dataset of your own (data.custom_cls)"
                )
            try:
                text_messages(prompt)
            except ValueError as error:
                return str(error)
        if not isinstance(row.get("extra_info") or {}, Mapping):
            return f"has extra_info={row['extra_info']!r:.80}, which must be a mapping"
        if self.require_ground_truth and _entry(row, "reward_model", "ground_truth") is None:
            return (
                "has no reward_model.ground_truth: the column reward_model holds "
                "{'ground_truth': …}, what the reward function compares answers with"
            )
        if self.require_ground_truth and not isinstance(row.get(scoring_key), str):
            return f"has no text under {scoring_key!r}, which chooses the scoring rule"
        return None


def measures_prompts(config: Any) -> bool:
    """Checks whether a `DataConfig` asks for prompts that fit, which are then measured."""
    return config.filter_overlong_prompts or config.truncation == "error"


def keep_fitting(
    rows: Sequence[Any], lengths: Sequence[int], origins: Sequence[str], config: Any
) -> list[Any]:
    """Returns the rows whose prompts have at most `data.max_prompt_length` tokens.

    Args:
        lengths: tokens of each row's prompt.
        origins: where each row comes from, for an error.
    Raises:
        ValueError: a prompt is too long and there is no filter, or none is left.
    """
    limit = config.max_prompt_length
    fitting = []
    overlong = []
    for row, length, origin in zip(rows, lengths, origins, strict=True):
        if length <= limit:
            fitting.append(row)
        else:
            overlong.append((origin, length))
    if overlong and not config.filter_overlong_prompts:
        origin, length = overlong[0]
        raise overlong_error(origin, length, limit, others=len(overlong) - 1)
    if not fitting:
        raise ValueError(
            f"data.filter_overlong_prompts leaves no prompt: all {len(lengths)} are longer "
            f"than data.max_prompt_length={limit}, the shortest has {min(lengths)} tokens; "
            "raise it"
        )
    logger.info(
        "dropped %d of %d prompts longer than %d tokens",
        len(overlong),
        len(lengths),
        limit,
    )
    return fitting


def _as_data_config(settings: Mapping[str, Any]) -> Any:
    """Makes the typed config of a mapping with some of its settings."""
    from training.config.schema.data import DataConfig

    chosen = {}
    for key in vars(DataConfig()):
        # Files are given beside it.
        if key in settings and "files" not in key:
            chosen[key] = settings[key]
    return DataConfig(**chosen)


def _is_written_messages(prompt: str) -> bool:
    """Checks whether a prompt's text is a JSON list of chat messages, as tables of text hold it."""
    if not prompt.lstrip().startswith("[{"):
        return False
    try:
        messages = json.loads(prompt)
    except ValueError:
        return False
    return all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
    """Checks whether a value is a chat message: a role, with content or tool calls."""
    if not isinstance(message, Mapping) or not message.get("role"):
        return False
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _origin(row: Mapping[str, Any]) -> str:
    """Names the file and line that a row comes from."""
    return str(row.get(ORIGIN, "a row"))


def _entry(row: Mapping[str, Any], column: str, key: str) -> Any:
    """Reads an entry of a column that holds a mapping; None where there is none."""
    content = row.get(column)
    if not isinstance(content, Mapping):
        return None
    return content.get(key)


def create_dataset(
    data_files: Files,
    data_config: Any,
    tokenizer: Tokenizer,
    processor: Processor = None,
    max_samples: int = -1,
) -> Dataset:
    """Makes the Dataset that `data.custom_cls` names, else an RLHFDataset.

    A custom class is built with RLHFDataset's first four arguments, by keyword; max_samples then
    takes a Subset.
    """
    custom = data_config.custom_cls
    if custom.path is None:
        return RLHFDataset(data_files, tokenizer, data_config, processor, max_samples=max_samples)
    dataset_cls = load_extern_object(custom.path, custom.name)
    if not (isinstance(dataset_cls, type) and issubclass(dataset_cls, Dataset)):
        raise TypeError(
            f"data.custom_cls: {custom.name} of {custom.path} must subclass "
            "torch.utils.data.Dataset"
        )
    dataset = dataset_cls(
        data_files=data_files, tokenizer=tokenizer, config=data_config, processor=processor
    )
    if 0 <= max_samples < len(dataset):
        return Subset(dataset, range(max_samples))
    return dataset
