"""Files of chats as a dataset of records, each with the place where it was found.

A record stays JSON text until it is encoded. `datasets`' own JSON reader would lose the line numbers and give up at a
malformed line; and Arrow gives all rows of a column the same fields, so that the arguments of one tool's call would
turn up, empty, in every other call.
"""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, IterableDataset, Value, load_from_disk

from .chat_records import CONVERSATION_COLUMNS, OTHER_COLUMNS
from .code_stamp import code_stamp

JSON_LINES = (".jsonl", ".ndjson", ".json")
FEATURES = Features({"number": Value("int64"), "source": Value("string"), "record": Value("binary")})
READ_AT_ONCE = 256  # rows of a table


def load_chat(files: list[str], streaming: bool = False, columns: tuple[str, ...] = ()) -> Dataset | IterableDataset:
    """All rows of some files, in order: `number` from 0, `source` (file:line or file:row index), `record` (JSON).

    Args:
        files: JSON lines (.jsonl, .ndjson, .json), Parquet, folders of `Dataset.save_to_disk`; glob patterns of them.
        streaming: read as it goes, instead of once into the cache of `datasets`.
        columns: names of columns, beside the usual ones, that conversations are in.

    Raises:
        FileNotFoundError: a pattern that matches nothing.
        ValueError: a file of another kind, a table without a column of conversations, files without a row. What is
            inside a record is not looked at.
    """
    paths = tuple(path for pattern in ([files] if isinstance(files, str) else files) for path in _matching(pattern))
    columns = tuple(columns)
    for path in paths:
        _check(path, columns)
    if next(_rows(paths, columns), None) is None:
        raise ValueError(f"there are no rows in {list(paths)}")
    # Tuples, because `datasets` takes lists for shards to deal out: rows are packed across files, so there is one.
    arguments = {"paths": paths, "columns": columns}
    if streaming:
        return IterableDataset.from_generator(_rows, features=FEATURES, gen_kwargs=arguments)
    # What is cached is found again by its arguments, so they say which state of the files it is of.
    arguments["state"] = (*map(_state, paths), code_stamp())
    return Dataset.from_generator(_rows, features=FEATURES, gen_kwargs=arguments)


def _matching(pattern: str) -> list[str]:
    if Path(pattern).exists():
        return [str(pattern)]
    found = sorted(glob.glob(str(pattern), recursive=True))
    if not found:
        raise FileNotFoundError(f"no file is named, or matches, {pattern}")
    return found


def _check(path: str, columns: tuple[str, ...]) -> None:
    """Raises a `ValueError` if a file cannot be one of chats, as far as its name, its schema or first line tell."""
    folder, suffix = Path(path), Path(path).suffix
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{path} has several splits: name one, {' or '.join(str(folder / name) for name in splits)}")
    if folder.is_dir() and not (folder / "state.json").is_file():
        raise ValueError(f"{path} is a folder, but not a saved dataset: give its files, such as {folder / '*.parquet'}")
    if not folder.is_dir() and suffix not in (*JSON_LINES, ".parquet"):
        raise ValueError(f"{path} is {suffix or 'without a suffix'}: {', '.join(JSON_LINES)} and .parquet can be read")
    if suffix in JSON_LINES and not folder.is_dir():
        _, first = next(_json_lines(path), ("", b""))
        if first in (b"[", b"[{"):
            raise ValueError(f"{path} is one JSON list over several lines: JSON lines, a row each, can be read")
    else:
        names = _column_names(path)
        if not (set(columns) <= set(names) if columns else set(names) & set(CONVERSATION_COLUMNS)):
            wanted = " and ".join(columns) or " or ".join(CONVERSATION_COLUMNS)
            raise ValueError(f"{path} has no column {wanted}, but {', '.join(names)}: name one by `column`")


def _column_names(path: str) -> list[str]:
    if Path(path).is_dir():
        return load_from_disk(path).column_names
    try:
        return pq.read_schema(path).names
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _state(path: str) -> tuple[int, int]:
    status = (Path(path) / "state.json" if Path(path).is_dir() else Path(path)).stat()
    return status.st_size, status.st_mtime_ns


def _rows(paths: tuple[str, ...], columns: tuple[str, ...], state: object = None) -> Iterator[dict]:
    number = 0
    for path in paths:
        records = _json_lines(path) if Path(path).suffix in JSON_LINES else _table_rows(path, columns)
        for place, record in records:
            yield {"number": number, "source": f"{path}:{place}", "record": record}
            number += 1


def _json_lines(path: str) -> Iterator[tuple[str, bytes]]:
    """Lines by number, from 1. Blank ones count as lines, but are no records."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield str(number), line.strip()


def _table_rows(path: str, columns: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Rows by index, from 0, as `dataset[index]` has them."""
    wanted = {*columns, *CONVERSATION_COLUMNS, *OTHER_COLUMNS}
    chosen = [name for name in _column_names(path) if name in wanted]
    index = 0
    for batch in _batches(path, chosen):
        kind = pa.struct(batch.schema)
        for row in batch.to_pylist():
            yield f"row {index}", json.dumps(_plain(row, kind), default=_unreadable).encode()
            index += 1


def _batches(path: str, columns: list[str]) -> Iterator[pa.RecordBatch | pa.Table]:
    if Path(path).is_dir():
        yield from load_from_disk(path).select_columns(columns).with_format("arrow").iter(READ_AT_ONCE)
    else:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(READ_AT_ONCE, columns=columns)


def _plain(value: object, kind: pa.DataType) -> object:
    """A value of a table as it would be in JSON lines.

    A struct's null fields go: a field that any row has is there in all, as null. What `datasets` stores as JSON text,
    because it differs from row to row, is read.
    """
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _from_json(value) if kind.extension_name == "arrow.json" else value
    if pa.types.is_struct(kind):
        return {name: _plain(part, kind.field(name).type) for name, part in value.items() if part is not None}
    if isinstance(value, list) and not pa.types.is_map(kind):
        return [_plain(part, kind.value_type) for part in value]
    return value


def _from_json(text: object) -> object:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _unreadable(value: object) -> dict:
    """What stands for a value that JSON has no form for: no text, so that it is found if it is needed as one."""
    return {"type": type(value).__name__}
