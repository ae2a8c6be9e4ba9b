"""Chats as rows for training: read, encoded, packed, and put into batches.

    rows, report = build_rows(["chats/*.jsonl"], tokenizer, DataOptions(max_length=4096, block_size=32))

`chat_files` reads, `chat_records` understands a row, `chat_encoding` finds what is to be learnt of it, `packing` lays
documents into rows, `data_report` counts. Nothing depends on the number of processes: each sees the same rows, and
transformers' Trainer deals them out.
"""

from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from .chat_encoding import ChatEncoder, Document, check_tokenizer
from .chat_files import load_chat
from .chat_records import BadRow
from .code_stamp import code_stamp
from .data_options import DataOptions
from .data_report import BAD_ROW, NOTHING_LEARNT, TOO_LONG, Report
from .packing import IGNORED, pack

__all__ = ["BadRow", "Collator", "DataOptions", "Report", "build_rows", "encode_chat", "load_chat", "pack"]

ENCODED_AT_ONCE = 256  # records
DOCUMENT_FEATURES = Features(
    {
        "number": Value("int64"),
        "source": Value("string"),
        "ids": List(Value("int32")),
        "trained": List(Value("bool")),
        "tokens": Value("int64"),
        "trained_tokens": Value("int64"),
        "dropped": Value("string"),
        "problem": Value("string"),
    }
)
SEED, PER_TOKEN = "noise_seed", {"input_ids": None, "labels": IGNORED, "document_ids": -1}


def build_rows(
    files: list[str], tokenizer: PreTrainedTokenizerBase, options: DataOptions, streaming: bool = False
) -> tuple[Dataset | IterableDataset, Report]:
    """Rows for training (see `pack`) of files of chats (see `load_chat`), and what became of the data.

    A streamed report is of the pass over the data that is under way. What is not streamed is cached by `datasets`.

    Raises:
        FileNotFoundError: a pattern that matches nothing.
        BadRow: a row that is bad, or too long, where the options say that this is an error; with file and line. When
            streaming, at the row.
        ValueError: files that cannot be read, a tokenizer that cannot be used, or nothing left to learn.
    """
    check_tokenizer(tokenizer)
    documents = encode_chat(load_chat(files, streaming, options.columns), tokenizer, options)
    report = Report()
    if streaming:
        return pack(documents, options, tokenizer.pad_token_id, report), report
    rows = pack(documents, options, tokenizer.pad_token_id)
    # Counted afterwards, because what is found in the cache is not computed.
    for table in documents.with_format("arrow").iter(ENCODED_AT_ONCE):
        report.add_documents(table)
    for table in rows.with_format("arrow").iter(ENCODED_AT_ONCE):
        report.add_rows(table)
    if not len(rows):
        raise ValueError(f"nothing of {files} is left to learn:\n{report}")
    return rows, report


def encode_chat(
    records: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> Dataset | IterableDataset:
    """A document for each record, as `load_chat` reads them, or, with `train_on="each"`, for each answer.

    A document has `number` and `source`; `ids` (n,) and `trained` (n,) bool, cut to `max_length`; `tokens` and
    `trained_tokens`, how many it had; `dropped`, why it is left out, or ""; `problem`, what is wrong with a bad row.

    Raises:
        BadRow: as in `build_rows`.
        ValueError: a tokenizer that cannot be used.
    """
    processes = {"num_proc": options.num_proc} if isinstance(records, Dataset) and options.num_proc > 1 else {}
    return records.map(
        _encoded,
        batched=True,
        batch_size=ENCODED_AT_ONCE,
        remove_columns=["record"],
        features=DOCUMENT_FEATURES,
        fn_kwargs={"encoder": ChatEncoder(tokenizer, options), "options": options, "code": code_stamp()},
        **processes,
    )


def _encoded(batch: dict[str, list], encoder: ChatEncoder, options: DataOptions, code: str) -> dict[str, list]:
    found = zip(batch["number"], batch["source"], encoder(batch["record"]), strict=True)
    documents = [
        {"number": number, "source": source} | _kept(one, source, options)
        for number, source, of_record in found
        for one in of_record
    ]
    return {name: [document[name] for document in documents] for name in DOCUMENT_FEATURES}


def _kept(document: Document | BadRow, source: str, options: DataOptions) -> dict:
    """What the options let pass of a document."""
    if isinstance(document, BadRow):
        problem = f"{source}: {document}"
        if options.on_bad_row == "error":
            raise BadRow(problem)
        return _dropped(BAD_ROW, 0, 0) | {"problem": problem}
    ids, trained = document.ids, document.trained
    counts = len(ids), int(trained.sum())
    if len(ids) > options.max_length:
        if options.too_long == "error":
            raise BadRow(f"{source}: {len(ids)} tokens are more than `max_length`, {options.max_length}")
        if options.too_long == "drop" or not trained[: options.max_length].any():
            return _dropped(TOO_LONG, *counts)
        # A block's end: a cut answer leaves no tail that would teach to stop there.
        ids, trained = ids[: options.max_length], trained[: options.max_length]
    if not trained.any():
        return _dropped(NOTHING_LEARNT, *counts)
    return _dropped("", *counts) | {"ids": ids, "trained": trained}


def _dropped(reason: str, tokens: int, trained_tokens: int) -> dict:
    counts = {"tokens": tokens, "trained_tokens": trained_tokens}
    nothing = {"ids": np.empty(0, np.int32), "trained": np.empty(0, bool)}  # as of the others: of these types
    return nothing | {"dropped": reason, "problem": ""} | counts


class Collator:
    """Rows into a batch, padded on the right to the longest row, a multiple of T.

    Returns `input_ids`, `labels`, `document_ids` (B, N) and `noise_seeds` (B,), long. Other columns, such as
    `decoding_order`, must have a number for each token; they are padded with 0.

    Args:
        length: pad to this N instead, for where all batches must have one shape.
    """

    def __init__(self, pad_token_id: int, block_size: int, length: int | None = None) -> None:
        if length is not None and (length < 1 or length % block_size):
            raise ValueError(f"`length` is {length}, but must be a multiple of `block_size`, {block_size}")
        self.padding = PER_TOKEN | {"input_ids": pad_token_id}
        self.block_size, self.length = block_size, length

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """A batch of rows, as `pack` makes them.

        Raises:
            ValueError: a row without one of the columns, with other columns than the first, with one that is not of a
                number for each token, or longer than `length`.
        """
        names = self._names(rows)
        longest = max(len(row["input_ids"]) for row in rows)
        width = self.length or -(-longest // self.block_size) * self.block_size
        if longest > width:
            raise ValueError(f"a row has {longest} tokens, but `length` is {width}")
        batch = {}
        for name in names:
            column = torch.full((len(rows), width), self.padding.get(name, 0))
            for filled, row in zip(column, rows, strict=True):
                filled[: len(row[name])] = torch.as_tensor(row[name])
            batch[name] = column
        return batch | {"noise_seeds": torch.tensor([row[SEED] for row in rows])}

    def _names(self, rows: Sequence[dict]) -> list[str]:
        """The columns that have a number for each token."""
        if missing := [name for name in (*PER_TOKEN, SEED) if name not in rows[0]]:
            raise ValueError(f"a row has no {' and no '.join(missing)}, but {', '.join(rows[0])}")
        names = [name for name in rows[0] if name != SEED]
        for row in rows:
            if row.keys() != rows[0].keys():
                raise ValueError(f"rows of a batch have different columns: {', '.join(row)}; {', '.join(rows[0])}")
            tokens = len(row["input_ids"])
            for name in names:
                if not isinstance(row[name], Sequence | np.ndarray | torch.Tensor) or len(row[name]) != tokens:
                    raise ValueError(f"`{name}` must have a number for each of the {tokens} tokens of a row")
        return names
