"""Conversations as token ids, and which of them to learn: the answers, each with the token that ends it.

What is learnt must be what is generated. So an answer begins where the generation prompt before it ends, and unless
the template marks answers itself ({% generation %}), the conversation's text and tokens are checked to begin with that
prompt. A template that writes an earlier answer differently from how it was generated, as Qwen's does without its
thoughts, is found out that way.

Where a template can open an answer with an empty thought (enable_thinking=False), an answer that has one is taken to
be asked for without thinking: the empty thought belongs to the prompt and is not learnt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from .chat_records import AmbiguousColumns, BadRow, Conversation, conversation_of, texts_of
from .data_options import DataOptions

RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 40  # characters of a text in an error


@dataclass(frozen=True)
class Document:
    """A conversation's tokens. ids: (n,) int32. trained: (n,) bool, those to learn."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class _Rendered:
    """A conversation's text. answers: of each its message's number, and the characters it starts and ends at."""

    text: str
    answers: list[tuple[int, int, int]]


class ChatEncoder:
    """Turns records into documents.

    Raises:
        ValueError: the tokenizer has no chat template, no token to pad with, or does not tell where its tokens stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer, self.options = tokenizer, options
        self._check_names("template_options", options.template_options, tokenizer.get_chat_template())
        added = tokenizer.added_tokens_decoder
        self._special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        names = sorted({added[id].content for id in self._special if id in added}, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def __call__(self, records: Sequence[bytes]) -> list[list[Document | BadRow]]:
        """Each record's documents, one unless each of its answers is to be one; or what is wrong with it.

        Raises:
            AmbiguousColumns: a record has several columns that could be its conversation.
        """
        found: list[list[_Rendered | Document | BadRow]] = []
        for record in records:
            try:
                conversation = conversation_of(record, self.options.columns)
                self._refuse_special_tokens(conversation)
                self._check_names_of(conversation)
                found.append([self._marked(part) or self._rendered(part) for part in self._parts(conversation)])
            except AmbiguousColumns:
                raise
            except BadRow as error:
                found.append([error])
        documents = iter(self._tokenized([one for of_record in found for one in of_record]))
        return [list(islice(documents, len(of_record))) for of_record in found]

    def _parts(self, conversation: Conversation) -> list[Conversation]:
        """The conversation; or, up to each of its answers, what it was when that was generated."""
        if self.options.train_on != "each":
            return [conversation]
        messages = conversation.messages
        return [replace(conversation, messages=messages[: at + 1], answers=(at,)) for at in conversation.answers]

    def _refuse_special_tokens(self, conversation: Conversation) -> None:
        if self.options.special_tokens == "allow":
            return
        for text in texts_of(conversation):
            if match := self._special_text.search(text):
                around = text[max(0, match.start() - SHOWN // 2) : match.end() + SHOWN // 2]
                raise BadRow(
                    f"the text {around!r} spells the special token {match[0]}, which the model would read as that "
                    "token: rewrite it, or allow such texts with special_tokens='allow'"
                )

    def _check_names_of(self, conversation: Conversation) -> None:
        try:
            self._check_names("chat_template_kwargs", conversation.template_options or {}, self._template(conversation))
        except ValueError as error:
            raise BadRow(str(error)) from None

    def _check_names(self, field: str, options: dict, template: str) -> None:
        """Raises a `ValueError` on what a template does not read, or what is not for a caller to say."""
        if not options:
            return
        environment = _compile_jinja_template(template).environment
        known = find_undeclared_variables(environment.parse(template)) - RESERVED
        for name in options:
            if name not in known:
                allowed = ", ".join(sorted(known - {*self.tokenizer.special_tokens_map, *environment.globals}))
                raise ValueError(f"`{field}` has {name!r}, but the chat template reads {allowed or 'none'}")

    # ---- templates that mark answers ----

    def _marked(self, conversation: Conversation) -> Document | None:
        """The document, if the conversation's template marks answers."""
        if not GENERATION.search(self._template(conversation)):
            return None
        encoded = self._applied(
            conversation,
            conversation.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        runs = _runs(np.array(encoded["assistant_masks"], dtype=bool))
        trained = np.zeros(len(ids), dtype=bool)
        for first, last in self._chosen_runs(conversation, runs):
            trained[first : self._end(ids, first, last)] = True
        return Document(ids, trained)

    def _chosen_runs(self, conversation: Conversation, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The marked runs of the answers to learn."""
        written = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        chosen = self._chosen(conversation)
        if chosen == written:
            return runs
        if len(runs) != len(written):
            raise BadRow(f"the template marks {len(runs)} parts of {len(written)} answers: learn all, not the last")
        return [run for at, run in zip(written, runs, strict=True) if at in chosen]

    # ---- templates that do not ----

    def _rendered(self, conversation: Conversation) -> _Rendered:
        whole, answers = self._text(conversation, conversation.messages), []
        for at in self._chosen(conversation):
            start = len(self._prompt_of(conversation, at, whole))
            messages = conversation.messages[: at + 1]
            upto = whole if len(messages) == len(conversation.messages) else self._text(conversation, messages)
            if not whole.startswith(upto):
                raise BadRow(self._differs(conversation, at, upto, whole))
            # The template may go on after the token that ends the answer, with a line break; nothing generates that.
            end = len(upto.rstrip())
            if end <= start:
                raise BadRow(f"message {at + 1} leaves no text to learn")
            answers.append((at + 1, start, end))
        return _Rendered(whole, answers)

    def _prompt_of(self, conversation: Conversation, at: int, whole: str) -> str:
        """The generation prompt that the answer goes on from; without thinking, if it goes on from that."""
        before = conversation.messages[:at]
        name = "enable_thinking"
        if name in self._template(conversation) and name not in self._arguments(conversation):
            silent = self._text(conversation, before, add_generation_prompt=True, enable_thinking=False)
            if whole.startswith(silent):
                return silent
        prompt = self._text(conversation, before, add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise BadRow(self._differs(conversation, at, prompt, whole))
        return prompt

    def _differs(self, conversation: Conversation, at: int, expected: str, whole: str) -> str:
        same = next((i for i, (a, b) in enumerate(zip(expected, whole, strict=False)) if a != b), len(whole))
        first = max(0, same - SHOWN // 2)
        message = (
            f"message {at + 1} is not written as it would be generated: as far as that the chat template "
            f"gives {expected[first : first + SHOWN]!r}, but {whole[first : first + SHOWN]!r} in the "
            "conversation, so what to learn cannot be told"
        )
        if at < conversation.answers[-1]:
            message += ". Make a document of each answer (train_on='each'), learn the last alone (train_on='last')"
            if "preserve_thinking" in self._template(conversation):
                message += ", or have the template keep thoughts (template_options={'preserve_thinking': True})"
        return message

    # ---- tokens ----

    def _tokenized(self, found: list[_Rendered | Document | BadRow]) -> list[Document | BadRow]:
        """The documents of what is rendered; what is none is returned as it is."""
        rendered = [one for one in found if isinstance(one, _Rendered)]
        if not rendered:
            return found
        wholes = self._ids([one.text for one in rendered], return_offsets_mapping=True)
        spans = [_spans(one, offsets) for one, offsets in zip(rendered, wholes["offset_mapping"], strict=True)]
        openings = iter(self._ids([opening for of_one in spans for _, _, opening in of_one])["input_ids"])
        encoded = iter(zip(wholes["input_ids"], spans, strict=True))
        documents = []
        for one in found:
            if isinstance(one, _Rendered):
                ids, of_one = next(encoded)
                taken = list(islice(openings, len(of_one)))
                try:
                    one = self._document(one, np.array(ids, dtype=np.int32), of_one, taken)
                except BadRow as error:
                    one = error
            documents.append(one)
        return documents

    def _ids(self, texts: list[str], **options):
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)

    def _document(
        self, rendered: _Rendered, ids: np.ndarray, spans: list[tuple[int, int, str]], openings: list[list[int]]
    ) -> Document:
        trained = np.zeros(len(ids), dtype=bool)
        for (number, start, _), (known, last, _), opening in zip(rendered.answers, spans, openings, strict=True):
            first = known + len(opening)
            if not np.array_equal(ids[known:first], opening):
                # Mostly white space: a line break that the answer begins with is one token with the prompt's last.
                begins = rendered.text[start : start + SHOWN]
                raise BadRow(
                    f"message {number} begins with {begins!r}, whose first token has begun in the prompt before it"
                )
            trained[first : self._end(ids, first, last)] = True
        return Document(ids, trained)

    def _end(self, ids: np.ndarray, first: int, last: int) -> int:
        """The place after the token that ends an answer of ids[first:last].

        Generation stops at the first end token. A template can write more after it, a line break mostly; and one that
        marks answers may leave it out of the mark, right behind it.
        """
        ends = np.flatnonzero(ids[first : last + 1] == self.tokenizer.eos_token_id)
        end = first + int(ends[0]) + 1 if len(ends) else last
        if ids[end - 1] not in self._special:
            name = self.tokenizer.convert_ids_to_tokens(int(ids[end - 1]))
            raise BadRow(f"the chat template ends an answer with {name!r}, no special token: it would never stop")
        return end

    # ---- the template ----

    def _chosen(self, conversation: Conversation) -> list[int]:
        return list(conversation.answers[-1:] if self.options.train_on == "last" else conversation.answers)

    def _template(self, conversation: Conversation) -> str:
        return self.tokenizer.get_chat_template(tools=_listed(conversation.tools))

    def _arguments(self, conversation: Conversation) -> dict:
        return self.options.template_options | (conversation.template_options or {})

    def _text(self, conversation: Conversation, messages: Sequence[dict], **options) -> str:
        return self._applied(conversation, messages, tokenize=False, **options)

    def _applied(self, conversation: Conversation, messages: Sequence[dict], **options):
        """`apply_chat_template`, whose every error is one of the row: a template is a program, and has its own."""
        arguments = self._arguments(conversation)
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=_listed(conversation.tools), **arguments | options
            )
        except Exception as error:
            raise BadRow(f"the chat template refuses it: {error}") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a `ValueError` on a tokenizer that chats cannot be encoded with."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no `chat_template`, which chats are written by")
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no `pad_token`, which rows are padded with: set one")
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer is a slow one, which does not tell where in the text a token stands")


def _listed(tools: tuple[dict, ...] | None) -> list[dict] | None:
    return list(tools) if tools else None


def _spans(rendered: _Rendered, offsets: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """Of each answer: a token before it, the token after its last, and the text from that token on up to the answer.

    The text's own tokens tell where the answer starts, and whether a token lies across that place. It begins with the
    token that ends the answer before: special tokens are cut out first, so what follows has the tokens that it has in
    the whole, and long conversations need not be tokenized again from their start for each answer.
    """
    ends, known, found = np.array([end for _, end in offsets]), 0, []
    for _, start, end in rendered.answers:
        last = int(np.searchsorted(ends, end, side="right"))
        found.append((known, last, rendered.text[offsets[known][0] if known else 0 : start]))
        known = last - 1
    return found


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of every run of True."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
