# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""What steers an answer: processors of the logits of masked positions, by what the row says so far.

A processor gets scores (N, V) in fp32, which it changes in place, and the rows that they belong to, in the same order.
A row knows its answer with gaps (`row.response`, None where nothing is known yet) and where its masked positions lie
in it (`row.open_positions`), so a processor can look to both sides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .configuration_clover import require

if TYPE_CHECKING:
    from .generation_clover import Row

Processor = Callable[[torch.Tensor, list["Row"]], None]


def by_row(scores: torch.Tensor, rows: list["Row"]) -> Iterator[tuple[torch.Tensor, "Row"]]:
    """Each row with the scores (n, V) of its n open positions."""
    return zip(scores.split([len(row.open_positions) for row in rows]), rows, strict=True)


def penalise_response(presence: float, frequency: float, repetition: float) -> Processor:
    """Makes what the answer holds already less likely: `presence` off the logit of each such token, `frequency` times
    its count (OpenAI's definitions), and division by `repetition` where the logit is positive, multiplication where
    it is negative (CTRL, arXiv 1909.05858). The prompt does not count; accepted tokens of the block do."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            known = torch.tensor([token for token in row.response if token is not None], dtype=torch.long)
            tokens, counts = (x.to(scores.device) for x in known.unique(return_counts=True))
            logits = part[:, tokens]
            logits = torch.where(logits > 0, logits / repetition, logits * repetition)
            part[:, tokens] = logits - presence - frequency * counts

    return process


def ramp(tokens: list[int], start: int, slope: float, max: float, marks: "Marks | None" = None) -> Processor:
    """Adds `min(max, slope * (position - start))` to the tokens' logits at positions of the answer after `start`.

    With the marks of thinking only while it is open, and only where nothing behind is known yet: an end put before
    text that goes on thinking would be no end.
    """

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            after = torch.tensor(row.open_positions, device=scores.device) - start
            bonus = (slope * after).clamp(0, max)
            if marks:
                known = [i for i, token in enumerate(row.response) if token is not None]
                bonus *= marks.is_open(row) * (after + start > (known[-1] if known else -1))
            part[:, tokens] += bonus[:, None]

    return process


def ban(tokens: list[int], banned_at: Callable[["Row"], list[bool]] | None = None) -> Processor:
    """Makes tokens impossible, at all open positions or at those that `banned_at` says."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            where = torch.tensor(banned_at(row) if banned_at else [True] * len(part), device=scores.device)
            part[:, tokens] = part[:, tokens].masked_fill(where[:, None], float("-inf"))

    return process


def by_position(processor: Callable, mask_token_id: int) -> Processor:
    """A processor of autoregressive generation, called for each open position with the tokens before it (1, L), the
    mask token where one is not known yet, and the position's scores (1, V)."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            text = row.prompt + [mask_token_id if token is None else token for token in row.response]
            text = torch.tensor([text], device=scores.device)
            for one, position in zip(part, row.open_positions, strict=True):
                processed = processor(text[:, : len(row.prompt) + position], one[None].clone())
                shape = getattr(processed, "shape", None)
                require(shape == (1, len(one)), "logits_processor", shape, f"to return scores {(1, len(one))}")
                one.copy_(processed[0])

    return process


class Forbidden:
    """Sequences that an answer must not hold: given words, and, n tokens long, those that it holds already.

    An answer has gaps, so a token can complete a sequence from its middle; and tokens that are accepted together can
    complete one that neither completes alone, so they are put one after the other.
    """

    def __init__(self, words: list[list[int]], ngram: int, text: list[int | None]):
        self.ngram, self.text = ngram, list(text)
        self.lengths = {len(word) for word in words} | ({ngram} if ngram else set())
        self.completions: dict[tuple, set[int]] = {}  # what must not stand between these left and right neighbours
        for word in words:
            self._forbid(word)
        for i in range(0, len(text), ngram) if ngram else ():
            self._remember_around(i)

    def _forbid(self, word: list[int]) -> None:
        for k, token in enumerate(word):
            self.completions.setdefault((tuple(word[:k]), tuple(word[k + 1 :])), set()).add(token)

    def _windows(self, i: int) -> list[list[int]]:
        """The n-grams around position i that have no gap."""
        starts = range(max(i - self.ngram + 1, 0), min(i, len(self.text) - self.ngram) + 1) if self.ngram else ()
        return [w for w in (self.text[a : a + self.ngram] for a in starts) if None not in w]

    def _remember_around(self, i: int) -> None:
        for window in self._windows(i):
            self._forbid(window)

    def _repeats_itself(self, i: int, token: int) -> bool:
        """Whether the token would make two equal n-grams at once."""
        self.text[i] = token
        windows = self._windows(i)
        self.text[i] = None
        return len({tuple(window) for window in windows}) < len(windows)

    def at(self, i: int) -> set[int]:
        """The tokens that must not stand at the gap i."""
        banned = set()
        for length in self.lengths:
            for a in range(max(i - length + 1, 0), min(i, len(self.text) - length) + 1):
                context = tuple(self.text[a:i]), tuple(self.text[i + 1 : a + length])
                banned |= self.completions.get(context, set())
        near = {token for token in self.text[max(i - self.ngram, 0) : i + self.ngram] if token is not None}
        return banned | {token for token in near if self._repeats_itself(i, token)}

    def allows(self, i: int, token: int) -> bool:
        return token not in self.at(i)

    def put(self, i: int, token: int) -> None:
        self.text[i] = token
        self._remember_around(i)


@dataclass(frozen=True)
class Marks:
    """The tokens between which an answer thinks."""

    start: int
    end: int

    def opened_by(self, prompt: list[int]) -> bool:
        """Whether a prompt ends inside a thinking part."""
        return next((token for token in reversed(prompt) if token in (self.start, self.end)), self.end) == self.start

    def is_open(self, row: "Row") -> bool:
        marks = (token for token in reversed(row.response) if token in (self.start, self.end))
        last = next(marks, None)
        return self.opened_by(row.prompt) if last is None else last == self.start


class ThinkingPart:
    """The one thinking part of an answer whose thinking is limited: where it begins and ends, as far as is known.

    A part that is open is closed by force at its limit, once all before that is known. Until then nothing is filled
    in from there on, since what follows depends on the end. Where tokens were accepted before the part was opened, the
    limit is the first open position after them.
    """

    def __init__(self, marks: Marks, limit: int, row: "Row"):
        self.marks, self.limit, self.text = marks, limit, row.response
        after = self.text.index(marks.start) + 1 if marks.start in self.text else None
        self.begin = 0 if marks.opened_by(row.prompt) else after
        self.end = next((i for i in range(self.begin or 0, len(self.text)) if self.text[i] == marks.end), None)

    @property
    def last(self) -> int | None:
        """Where an open part has to end at the latest; None if none is open."""
        if self.begin is None or self.end is not None:
            return None
        position = self.begin + self.limit
        while position < len(self.text) and self.text[position] is not None:
            position += 1
        return position

    def at(self, i: int) -> set[int]:
        """The marks that must not stand at the gap i."""
        second_start = self.begin is not None or (self.end is not None and i > self.end)
        second_end = self.end is not None or (self.begin is not None and i < self.begin)
        return ({self.marks.start} if second_start else set()) | ({self.marks.end} if second_end else set())

    def allows(self, i: int, token: int) -> bool:
        """Of tokens that are accepted together: none from the limit on, and no end whose beginning is not known."""
        late = self.last is not None and i >= self.begin + self.limit
        loose = token == self.marks.end and self.begin is None
        return not late and not loose and token not in self.at(i)

    def put(self, i: int, token: int) -> None:
        self.text[i] = token
        if token == self.marks.start:
            self.begin = i + 1
        elif token == self.marks.end:
            self.end = i


class RampedEnd:
    """Of tokens that are accepted together none stands behind an end of thinking that a ramp may have brought: they
    were chosen as if thinking went on."""

    def __init__(self, marks: Marks, start: int):
        self.mark, self.start, self.end, self.last = marks.end, start, float("inf"), -1

    def at(self, i: int) -> set[int]:
        return set()

    def allows(self, i: int, token: int) -> bool:
        return i < self.end and not (self._is_ramped(i, token) and i < self.last)

    def put(self, i: int, token: int) -> None:
        self.last = max(self.last, i)
        if self._is_ramped(i, token):
            self.end = i

    def _is_ramped(self, i: int, token: int) -> bool:
        return token == self.mark and i > self.start


def close_thinking(marks: Marks, limit: int) -> Callable[["Row"], None]:
    """What prepares a row for a pass: closes its thinking part where that is due, or holds back what comes after."""

    def prepare(row: "Row") -> None:
        part, first = ThinkingPart(marks, limit, row), len(row.prompt) - row.start
        last, row.held_from = part.last, None
        if last is None or last >= len(part.text):
            return
        if None in part.text[part.begin : last]:
            row.held_from = first + part.begin + limit
        else:
            row.fill(first + last, marks.end)

    return prepare


class Rule(Protocol):
    """What an answer must not hold, as it is being filled in."""

    def at(self, i: int) -> set[int]:
        """The tokens that must not stand at the gap i."""

    def allows(self, i: int, token: int) -> bool:
        """Whether a token that has been accepted can stand at the gap i, beside those that were put before it."""

    def put(self, i: int, token: int) -> None:
        """Fills a gap."""


RulesOf = Callable[["Row"], list[Rule]]


def forbid(rules_of: RulesOf) -> Processor:
    """Bans the tokens that a row's rules forbid."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            rules = rules_of(row)
            for one, position in zip(part, row.open_positions, strict=True):
                one[list(set().union(*(rule.at(position) for rule in rules)))] = float("-inf")

    return process


def processors_of(config: GenerationConfig, eos: list[int], user: list, mask_token_id: int) -> list[Processor]:
    """The processors that a config asks for, in transformers' order: penalties, bans, the user's."""
    found = []
    penalties = (config.presence_penalty, config.frequency_penalty, config.repetition_penalty)
    if penalties != (0, 0, 1):
        found.append(penalise_response(*penalties))
    if config.stop_ramp:
        found.append(ramp(eos, **config.stop_ramp))
    if config.think_end_ramp:
        marks = marks_of(config)
        found.append(ramp([marks.end], **config.think_end_ramp, marks=marks))
    if config.min_new_tokens:
        found.append(ban(eos, lambda row: [i < config.min_new_tokens for i in row.open_positions]))
    if config.suppress_tokens:
        found.append(ban(config.suppress_tokens))
    rules = rules_of(config)
    if rules is not None:
        found.append(forbid(rules))
    return found + [by_position(processor, mask_token_id) for processor in user]


def marks_of(config: GenerationConfig) -> Marks:
    return Marks(config.think_start_token_id, config.think_end_token_id)


def rules_of(config: GenerationConfig) -> RulesOf | None:
    """The rules that a config makes for an answer; None if it makes none."""
    words, ngram = [list(word) for word in config.bad_words_ids or []], config.no_repeat_ngram_size or 0
    makers, limit = [], config.max_thinking_tokens
    if limit is not None:  # first, since where thinking begins decides what else can stand
        makers.append(lambda row: ThinkingPart(marks_of(config), limit, row))
    if config.think_end_ramp:
        makers.append(lambda row: RampedEnd(marks_of(config), config.think_end_ramp["start"]))
    if words or ngram:
        makers.append(lambda row: Forbidden(words, ngram, row.response))
    return (lambda row: [make(row) for make in makers]) if makers else None


def filters_of(config: GenerationConfig) -> tuple[LogitsProcessor, ...]:
    """transformers' filters of a distribution, in its order."""
    kinds = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return tuple(kinds[n](getattr(config, n)) for n in kinds if getattr(config, n) not in (None, off[n]))
