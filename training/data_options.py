"""What can be chosen about the data of fine-tuning."""

from dataclasses import dataclass, field

TOO_LONG = ("drop", "truncate", "error")
ON_BAD_ROW = ("error", "skip")
TRAIN_ON = ("all", "last", "each")
SPECIAL_TOKENS = ("refuse", "allow")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` is {value!r}, but must be {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class DataOptions:
    """How chats become rows.

    max_length: positions of a row, at most. block_size: T, the grid that documents are aligned to; `max_length` is a
        multiple of it. packing: several documents a row, or one.
    too_long: what becomes of a document of more than `max_length` tokens: "drop", "truncate" (on the right), "error".
    on_bad_row: "error" names the first bad row and stops, "skip" counts bad rows and lists the first few.
    train_on: "all" answers of a conversation, or its "last"; or "each", the conversation once for each answer, up to
        it, for templates that write an answer differently once others follow. Tokens are counted each time then.
    seed: of the masks, and of the order of packed rows.
    column: where the conversation is, if a row has several that could be it: a column's name, or two with a comma
        between, a prompt's and a completion's.
    template_options: arguments of the chat template, such as {"preserve_thinking": True}; what a row has under
        `chat_template_kwargs` goes before them.
    special_tokens: "refuse" holds a row bad whose text spells a special token, such as <|im_end|>; "allow" lets the
        tokenizer read it as that token.
    num_proc: processes that encode; without effect when streaming.

    Raises:
        ValueError: a value that is not allowed, by name and with what is.
    """

    max_length: int = 4096
    block_size: int = 32
    packing: bool = True
    too_long: str = "drop"
    on_bad_row: str = "error"
    train_on: str = "all"
    seed: int = 0
    column: str | None = None
    template_options: dict = field(default_factory=dict)
    special_tokens: str = "refuse"
    num_proc: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "max_length", "num_proc"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an int of at least 1")
        size = self.block_size
        _require(self.max_length % size == 0, "max_length", self.max_length, f"a multiple of `block_size`, {size}")
        for name, allowed in (
            ("too_long", TOO_LONG),
            ("on_bad_row", ON_BAD_ROW),
            ("train_on", TRAIN_ON),
            ("special_tokens", SPECIAL_TOKENS),
        ):
            _require(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(map(repr, allowed)))
        _require(isinstance(self.packing, bool), "packing", self.packing, "True or False")
        _require(_is_int(self.seed), "seed", self.seed, "an int")
        _require(isinstance(self.template_options, dict), "template_options", self.template_options, "a dict")
        names = self.column.split(",") if isinstance(self.column, str) else []
        fits = self.column is None or (len(names) in (1, 2) and all(name.strip() for name in names))
        _require(fits, "column", self.column, "a column's name, or two with a comma between")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in `column`: none, one or two."""
        return tuple(name.strip() for name in self.column.split(",")) if self.column else ()
