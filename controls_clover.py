# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""What steers an answer: processors of the logits of masked positions, by what the row says so far.

A processor gets scores (N, V) in fp32, which it changes in place, and the rows that they belong to, in the same order.
A row knows its answer with gaps (`row.response`, None where nothing is known yet) and where its masked positions lie
in it (`row.open_positions`), so a processor can look to both sides.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

if TYPE_CHECKING:
    from .generation_clover import Row

Processor = Callable[[torch.Tensor, list["Row"]], None]


def by_row(scores: torch.Tensor, rows: list["Row"]) -> Iterator[tuple[torch.Tensor, "Row"]]:
    """Each row with the scores (n, V) of its n open positions."""
    return zip(scores.split([sum(row.masked) for row in rows]), rows, strict=True)


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


def ramp(tokens: list[int], start: int, slope: float, max: float, applies: Callable[["Row"], bool]) -> Processor:
    """Adds `min(max, slope * (position - start))` to the tokens' logits at positions of the answer after `start`."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            if applies(row):
                after = torch.tensor(row.open_positions, device=scores.device) - start
                part[:, tokens] += (slope * after).clamp(0, max)[:, None]

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
            for one, position in zip(part, row.open_positions, strict=True):
                before = torch.tensor([text[: len(row.prompt) + position]], device=scores.device)
                one.copy_(processor(before, one[None].clone())[0])

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

    def put(self, i: int, token: int) -> None:
        self.text[i] = token
        self._remember_around(i)

    def allowed(self, candidates: list[tuple[int, int]]) -> set[int]:
        """Which of these positions can take these tokens, the first ones first."""
        kept = set()
        for i, token in candidates:
            if token not in self.at(i):
                self.put(i, token)
                kept.add(i)
        return kept


ForbiddenIn = Callable[[list[int | None]], Forbidden]  # what an answer with this response must not hold


def forbid(forbidden: ForbiddenIn) -> Processor:
    """Bans the tokens that would complete a forbidden sequence."""

    def process(scores: torch.Tensor, rows: list["Row"]) -> None:
        for part, row in by_row(scores, rows):
            sequences = forbidden(row.response)
            for one, position in zip(part, row.open_positions, strict=True):
                one[list(sequences.at(position))] = float("-inf")

    return process


class Thinking:
    """Where a row's thinking part is open, and the means to close it after `limit` tokens."""

    def __init__(self, start_token_id: int, end_token_id: int, limit: int | None = None):
        self.start, self.end, self.limit = start_token_id, end_token_id, limit
        self.in_prompt: dict[int, bool] = {}  # by row: whether its prompt ends inside a thinking part

    def since(self, row: "Row") -> int | None:
        """Where in the response the open thinking part begins; None if none is open."""
        for i, token in reversed(list(enumerate(row.response))):
            if token in (self.start, self.end):
                return i + 1 if token == self.start else None
        if row.index not in self.in_prompt:
            marks = (token for token in reversed(row.prompt) if token in (self.start, self.end))
            self.in_prompt[row.index] = next(marks, self.end) == self.start
        return 0 if self.in_prompt[row.index] else None

    def close(self, row: "Row") -> None:
        """Puts the end of thinking on the first open position from the limit on, if thinking goes on until there."""
        since = self.since(row)
        late = [] if since is None else [p for p in row.open_positions if p >= since + self.limit]
        if late:
            row.fill(late[0] + len(row.prompt) - row.start, self.end)

    def needless(self, row: "Row") -> list[bool]:
        """For each open position, whether an end of thinking stands after it, or the one before it has no new start:
        there must not be two."""
        marks = [(i, token) for i, token in enumerate(row.response) if token in (self.start, self.end)]
        found = []
        for position in row.open_positions:
            before = [token for i, token in marks if i < position]
            after = [token for i, token in marks if i > position]
            found.append(self.end in after[:1] or self.end in before[-1:])
        return found


def processors_of(config: GenerationConfig, eos: list[int], user: list, mask_token_id: int) -> list[Processor]:
    """The processors that a config asks for, in transformers' order: penalties, bans, the user's."""
    found = []
    penalties = (config.presence_penalty, config.frequency_penalty, config.repetition_penalty)
    if penalties != (0, 0, 1):
        found.append(penalise_response(*penalties))
    if config.stop_ramp:
        found.append(ramp(eos, **config.stop_ramp, applies=lambda row: True))
    if config.think_end_ramp:
        thinking = Thinking(config.think_start_token_id, config.think_end_token_id)
        is_open = lambda row: thinking.since(row) is not None  # noqa: E731
        found.append(ramp([thinking.end], **config.think_end_ramp, applies=is_open))
    if config.min_new_tokens:
        found.append(ban(eos, lambda row: [i < config.min_new_tokens for i in row.open_positions]))
    if config.suppress_tokens:
        found.append(ban(config.suppress_tokens))
    if config.max_thinking_tokens is not None:
        thinking = Thinking(config.think_start_token_id, config.think_end_token_id)
        found.append(ban([thinking.end], thinking.needless))
    if config.no_repeat_ngram_size or config.bad_words_ids:
        found.append(forbid(forbidden_of(config)))
    return found + [by_position(processor, mask_token_id) for processor in user]


def forbidden_of(config: GenerationConfig) -> ForbiddenIn | None:
    """The sequences that a config forbids, given a response; None if it forbids none."""
    words, ngram = [list(word) for word in config.bad_words_ids or []], config.no_repeat_ngram_size or 0
    return (lambda response: Forbidden(words, ngram, response)) if words or ngram else None


def filters_of(config: GenerationConfig) -> tuple[LogitsProcessor, ...]:
    """transformers' filters of a distribution, in its order."""
    kinds = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return tuple(kinds[n](getattr(config, n)) for n in kinds if getattr(config, n) not in (None, off[n]))
