"""What became of the data: documents and tokens read, kept and lost, and how full the rows are."""

import logging

import pyarrow as pa
import pyarrow.compute as pc
import torch

logger = logging.getLogger(__name__)

BAD_ROW, TOO_LONG, NOTHING_LEARNT = "bad row", "too long", "nothing to learn"
REASONS = (BAD_ROW, TOO_LONG, NOTHING_LEARNT)
DROPPED = {reason: f"documents dropped: {reason}" for reason in REASONS}
COUNTS = (
    "documents read",
    "documents kept",
    "documents truncated",
    *DROPPED.values(),
    "tokens read",
    "tokens kept",
    "trained tokens read",
    "trained tokens kept",
    "rows",
    "positions",
)
SHOWN = 5  # bad rows that are named


class Report:
    """Counts by name (`report["tokens kept"]`), and the first few bad rows. `str()` of it is a table.

    Of a stream it grows while rows are read, and starts again with each pass over the data. Tokens are those of
    documents that could be encoded: bad rows have none.
    """

    def __init__(self) -> None:
        # Shared memory, because a worker of a DataLoader reads a stream in a process of its own.
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64).share_memory_()
        self.bad_rows: list[str] = []

    def __getitem__(self, name: str) -> int:
        return int(self._counts[COUNTS.index(name)])

    def as_dict(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._counts.tolist(), strict=True))

    def reset(self) -> None:
        self._counts.zero_()
        self.bad_rows.clear()

    def _add(self, name: str, count: int) -> None:
        self._counts[COUNTS.index(name)] += count

    def add_documents(self, documents: pa.Table, log: bool = False) -> None:
        """Counts a table of documents, as `encode_chat` makes them; `log` warns of the first bad rows at once."""
        kept = documents.filter(pc.equal(documents["dropped"], ""))
        lengths, read = pc.list_value_length(kept["ids"]), kept["tokens"]
        self._add("documents read", len(documents))
        self._add("documents kept", len(kept))
        self._add("documents truncated", _sum(pc.less(lengths, read)))
        for reason, name in DROPPED.items():
            self._add(name, _sum(pc.equal(documents["dropped"], reason)))
        self._add("tokens read", _sum(documents["tokens"]))
        self._add("trained tokens read", _sum(documents["trained_tokens"]))
        self._add("tokens kept", _sum(lengths))
        self._add("trained tokens kept", _sum(pc.list_flatten(kept["trained"])))
        bad = documents.filter(pc.equal(documents["dropped"], BAD_ROW))
        for problem in bad["problem"][: SHOWN - len(self.bad_rows)].to_pylist():
            self.bad_rows.append(problem)
            if log:
                logger.warning("Skipped %s", problem)

    def add_rows(self, rows: pa.Table) -> None:
        """Counts a table of rows, as `pack` makes them."""
        self._add("rows", len(rows))
        self._add("positions", _sum(pc.list_value_length(rows["input_ids"])))

    def __str__(self) -> str:
        read, trained = self["tokens read"], self["trained tokens read"]
        kept, trained_kept = self["tokens kept"], self["trained tokens kept"]
        padding = 1 - kept / self["positions"] if self["positions"] else 0.0
        lines = [
            f"documents read      {self['documents read']:>14,}",
            f"  kept              {self['documents kept']:>14,}, {self['documents truncated']:,} of them truncated",
            *(f"  {reason:<18}{self[name]:>14,}" for reason, name in DROPPED.items()),
            f"{'tokens':<20}{'trained':>14} {'other':>14} {'all':>14}",
            *(
                f"  {name:<18}{learnt:>14,} {every - learnt:>14,} {every:>14,}"
                for name, learnt, every in (
                    ("read", trained, read),
                    ("kept", trained_kept, kept),
                    ("lost", trained - trained_kept, read - kept),
                )
            ),
            f"rows                {self['rows']:>14,} of {self['positions']:,} positions, {padding:.1%} padding",
        ]
        if self.bad_rows:
            lines += [f"the first {len(self.bad_rows)} bad rows:", *(f"  {problem}" for problem in self.bad_rows)]
        return "\n".join(lines)


def _sum(values: pa.ChunkedArray | pa.Array) -> int:
    return pc.sum(values).as_py() or 0
