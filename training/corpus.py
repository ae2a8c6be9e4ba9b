"""Endless, seeded training conversations and the held-out exchanges, made from `tasks`.

A request belongs to one split by its own hash, so no held-out request can turn up in training.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from clover.training.tasks import TASKS, Exchange, final_part

HELDOUT_SHARE = 0.05
TWO_TURN_SHARE = 0.15
NO_THINKING_SHARE = 0.10
ANSWER_HEADER = "<|im_start|>assistant\n"
EMPTY_THINKING = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Document:
    """A conversation; without `thinking` its last answer opens with an empty thought."""

    exchanges: tuple[Exchange, ...]
    thinking: bool = True


def prompt_key(exchange: Exchange) -> str:
    """The canonical request: the user's text alone, however it is spaced or cased.

    The tools offered are left out on purpose: a held-out request then stays unseen with any choice of tools.
    """
    text = " ".join(message["content"] for message in exchange.messages if message["role"] == "user")
    return " ".join(text.lower().split())


def split_of(exchange: Exchange) -> str:
    """The split that a request belongs to, `train` or `heldout`."""
    digest = hashlib.sha256(prompt_key(exchange).encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


def exchanges(split: str, seed: int, tasks: Sequence[str] | None = None) -> Iterator[Exchange]:
    """Exchanges of one split without end, their tasks drawn uniformly."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")
    rng, names = Random(f"{split} {seed}"), list(tasks or TASKS)
    while True:
        # The task is drawn once and kept until it yields: the split must not change the mix of tasks.
        draw = TASKS[rng.choice(names)]
        exchange = draw(rng)
        while split_of(exchange) != split:
            exchange = draw(rng)
        yield exchange


def heldout(n: int = 1000, seed: int = 0, tasks: Sequence[str] | None = None) -> list[Exchange]:
    """`n` held-out exchanges with different requests, the tasks taking turns."""
    sources = [exchanges("heldout", seed, [task]) for task in tasks or TASKS]
    found: dict[str, Exchange] = {}
    while len(found) < n:
        source = sources[len(found) % len(sources)]
        exchange = next(source)
        found.setdefault(prompt_key(exchange), exchange)
    return list(found.values())


def documents(seed: int) -> Iterator[Document]:
    """Training conversations without end."""
    rng, source = Random(f"documents {seed}"), exchanges("train", seed)
    while True:
        turns = 2 if rng.random() < TWO_TURN_SHARE else 1
        thinking = rng.random() >= NO_THINKING_SHARE
        yield Document(tuple(next(source) for _ in range(turns)), thinking)


def tools_of(document: Document) -> list[dict]:
    """The tools of all exchanges of a conversation, each once."""
    tools = (tool for exchange in document.exchanges for tool in exchange.tools or ())
    return list({tool["function"]["name"]: tool for tool in tools}.values())


def messages_of(document: Document) -> list[dict]:
    """The conversation as chat messages, the last answer without the empty thought it may open with."""
    messages = []
    for exchange in document.exchanges:
        answer = exchange.answer if document.thinking else final_part(exchange.answer)
        messages += [*exchange.messages, {"role": "assistant", "content": answer}]
    return messages


def write_chats(path: Path, split: str, count: int, seed: int = 0, tasks: Sequence[str] | None = None) -> None:
    """Writes exchanges as chats, JSON lines of `messages` and `tools`, as fine-tuning and its questions read them."""
    found = heldout(count, seed, tasks) if split == "heldout" else islice(exchanges(split, seed, tasks), count)
    with open(path, "w") as file:
        for exchange in found:
            answer = {"role": "assistant", "content": exchange.answer}
            chat = {"messages": [*exchange.messages, answer]}
            chat |= {"tools": list(exchange.tools)} if exchange.tools else {}
            file.write(json.dumps(chat, ensure_ascii=False) + "\n")


def _signature(tool: dict) -> str:
    function = tool["function"]
    return f"{function['name']}({', '.join(function['parameters']['properties'])})"


def render(document: Document) -> str:
    """The conversation as text, equal to the chat template's output and much faster to make.

    Without thinking the last answer follows the empty thought of the generation prompt. Earlier answers
    have none, as a client that sends them back has only the text that came after it.
    """
    *past, last = messages_of(document)
    parts = []
    if tools := tools_of(document):
        parts.append("<|im_start|>system\nTools:\n" + "\n".join(map(_signature, tools)) + "<|im_end|>\n")
    parts += [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in past]
    parts.append(ANSWER_HEADER + ("" if document.thinking else EMPTY_THINKING) + last["content"] + "<|im_end|>\n")
    return "".join(parts)


class Encoder:
    """Turns conversations into token ids and the mask of the tokens to learn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look up the marks that open and close an answer."""
        self._backend = tokenizer.backend_tokenizer
        self._header = self._ids(ANSWER_HEADER)
        self._empty_thinking = self._ids(EMPTY_THINKING)
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def __call__(self, batch: Iterable[Document]) -> list[tuple[list[int], list[bool]]]:
        """Ids and mask of each conversation."""
        batch = list(batch)
        encodings = self._backend.encode_batch_fast([render(document) for document in batch], add_special_tokens=False)
        return [
            (encoding.ids, self._mask(encoding.ids, document.thinking))
            for encoding, document in zip(encodings, batch, strict=True)
        ]

    def _mask(self, ids: list[int], thinking: bool) -> list[bool]:
        """True from each answer's first token to its end mark.

        Without thinking only the last answer counts: the earlier ones stand without the empty thought,
        and learning them would teach to skip thinking where it was not switched off.
        """
        mask, header, opening = [False] * len(ids), self._header, self._empty_thinking
        answers = [
            at + len(header)
            for at, token in enumerate(ids)
            if token == header[0] and ids[at : at + len(header)] == header
        ]
        for first in answers if thinking else answers[-1:]:
            if not thinking and ids[first : first + len(opening)] == opening:
                first += len(opening)
            last = ids.index(self._end, first)
            mask[first : last + 1] = [True] * (last + 1 - first)
        return mask


def encode(tokenizer: PreTrainedTokenizerBase, document: Document) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and a mask that is True on every token of an answer to learn."""
    return Encoder(tokenizer)([document])[0]
