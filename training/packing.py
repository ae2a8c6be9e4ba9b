"""Documents into rows: each from a multiple of T on, padded to whole blocks, and as many a row as fit."""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value

from ..objective_clover import IGNORED
from .code_stamp import code_stamp
from .data_options import DataOptions
from .data_report import Report

ROW_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "document_ids": List(Value("int32")),
        "noise_seed": Value("int64"),
    }
)
# Rows are packed out of a window of documents. It bounds what is in memory and what a stream waits for, and a row in
# each of them stays half empty: 2,048 documents of 4,096 tokens, fewer of longer ones.
WINDOW_TOKENS, WINDOW_DOCUMENTS = 2**23, 2048


def pack(
    documents: Dataset | IterableDataset, options: DataOptions, pad_token_id: int, report: Report | None = None
) -> Dataset | IterableDataset:
    """Rows of documents as `encode_chat` makes them; those that are dropped there are left out.

    A row has, N being a multiple of T and `max_length` at most: `input_ids` (N,); `labels` (N,), the ids to learn and
    elsewhere -100; `document_ids` (N,), 0, 1, ... by document and -1 on padding; `noise_seed`, an int of 62 bits that
    follows from the seed and the documents alone. The same documents give the same rows, streamed or not.

    Args:
        report: counts documents and rows as they pass; for streams.
    """
    window = max(1, min(WINDOW_DOCUMENTS, WINDOW_TOKENS // options.max_length))
    rows = documents.with_format("arrow").map(
        _rows_of_window,
        batched=True,
        batch_size=window,
        remove_columns=documents.column_names,
        features=ROW_FEATURES,
        fn_kwargs={"options": options, "pad_token_id": pad_token_id, "report": report, "code": code_stamp()},
    )
    return rows.with_format(None)


def derived_seed(*parts: int | str) -> int:
    """A number of 62 bits that follows from the parts: as a seed it leaves room to add to in 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 2


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of items by bin: the largest first, each into the fullest bin that has room for it.

    Bins hold at most `capacity`; no item may be larger. Indices rise within a bin, bins are in order of their first.
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = defaultdict(list)  # by the room they have
    rooms: list[int] = []  # those that some bin has, rising
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(rooms, sizes[item])
        if at < len(rooms):
            room = rooms[at]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del rooms[at]
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = room - sizes[item]
        if not open_bins[left]:
            insort(rooms, left)
        open_bins[left].append(chosen)
    return sorted(sorted(items) for items in bins)


def _rows_of_window(
    documents: pa.Table, options: DataOptions, pad_token_id: int, report: Report | None, code: str
) -> pa.Table:
    kept = documents.filter(pc.equal(documents["dropped"], ""))
    ids, trained, numbers = _lists(kept["ids"]), _lists(kept["trained"]), kept["number"].to_pylist()
    blocks = [-(-len(one) // options.block_size) for one in ids]
    if options.packing:
        chosen = best_fit(blocks, options.max_length // options.block_size)
        # In order of their first documents, rows of many short ones would come early, and nobody shuffles a stream.
        Random(derived_seed("order", options.seed, *numbers[:1])).shuffle(chosen)
    else:
        chosen = [[item] for item in range(len(ids))]
    rows = [_row([(numbers[i], ids[i], trained[i]) for i in items], options, pad_token_id) for items in chosen]
    table = pa.table({name: [row[name] for row in rows] for name in ROW_FEATURES}, schema=ROW_FEATURES.arrow_schema)
    if report is not None:
        if documents["number"][0].as_py() == 0:  # a new pass over the data
            report.reset()
        report.add_documents(documents, log=True)
        report.add_rows(table)
    return table


def _row(documents: list[tuple[int, np.ndarray, np.ndarray]], options: DataOptions, pad_token_id: int) -> dict:
    """A row of documents (number, ids, which to learn)."""
    size = options.block_size
    lengths = [-(-len(ids) // size) * size for _, ids, _ in documents]
    input_ids = np.full(sum(lengths), pad_token_id, dtype=np.int32)
    labels, document_ids = np.full_like(input_ids, IGNORED), np.full_like(input_ids, -1)
    first = 0
    for index, ((_, ids, trained), length) in enumerate(zip(documents, lengths, strict=True)):
        place = slice(first, first + len(ids))
        input_ids[place], document_ids[place] = ids, index
        labels[place] = np.where(trained, ids, IGNORED)
        first += length
    seed = derived_seed("noise", options.seed, *(number for number, _, _ in documents))
    return {"input_ids": input_ids, "labels": labels, "document_ids": document_ids, "noise_seed": seed}


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The arrays of a column of lists."""
    found = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_pylist()
        found += [values[first:last] for first, last in pairwise(offsets)]
    return found
