# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""How a Clover writes: block after block, each filled where the model is sure.

For a block of `block_size` positions on a grid anchored at a row's first real token:

1. mask it; where the prompt ends inside it, the prompt's tail stays clean.
2. repeat until nothing that can still be shown is masked:
   a. a denoising pass over the block gives logits for its masked positions;
   b. processors (penalties, ramps, bans, the user's) change them;
   c. `LowConfidence` chooses a token for each, and accepts those with confidence above `threshold`, or else the one
      most confident position;
   d. accepted tokens are filled in, and never change again; what is known without a gap joins the answer.
3. stop at an end token, a stop string, a criterion, the time or the budget; otherwise commit the block with a causal
   pass and go on to the next.

Greedy and without processors this is SGLang's `LowConfidence` algorithm (0.5.23), token by token, but for one thing:
the mask token is never chosen. (SGLang emits it, or never ends.) Its probability stays in the normalisation, so
confidences are the same.

The loop, `block_diffusion`, knows no model: it calls `prefill`, `denoise` and `commit` of whatever it is given.
"""

import difflib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    MinPLogitsWarper,
    StopStringCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .configuration_clover import require

# ---- choosing tokens -------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """tokens (B, T) long; accepted (B, T) bool; confidences (B, T) fp32, -inf where nothing was masked."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    confidences: torch.Tensor


@dataclass(frozen=True)
class LowConfidence:
    """Fills the masked positions that the model is sure of. Source: SGLang 0.5.23, `dllm/algorithm/low_confidence.py`.

    The token is the most probable one, or a drawn one, the mask token excepted; its confidence is its probability, in
    fp32, with the mask token's share left in the normalisation. Accepted are masked positions of confidence strictly
    above `threshold`; a row that has none accepts its most confident one. Ties go to the first token, the first
    position. Temperature and filters come before all of this: confidence is probability under what is drawn from.
    """

    threshold: float
    mask_token_id: int
    temperature: float = 1.0
    filters: tuple[LogitsProcessor, ...] = ()  # transformers' warpers, which look at the scores alone
    generators: tuple[torch.Generator, ...] | None = None  # one for each row of the whole batch; None: greedy

    def __call__(self, logits: torch.Tensor, masked: torch.Tensor, rows: list[int] | None = None) -> Choice:
        """Chooses tokens for a batch of blocks.

        Args:
            logits: (N, V) of the N masked positions, in the order of `masked.nonzero()`.
            masked: (B, T) bool, with N True.
            rows: the generator of each block; only needed to draw.
        """
        scores = logits.float() if self.temperature == 1 else logits.float() / self.temperature
        normaliser = scores.logsumexp(-1)
        mask_column = torch.tensor([self.mask_token_id], device=scores.device)
        scores = scores.index_fill(-1, mask_column, float("-inf"))
        if self.filters:
            mask_share = normaliser - scores.logsumexp(-1)
            for warp in self.filters:
                scores = warp(None, scores)
            normaliser = scores.logsumexp(-1) + mask_share
        best, chosen = scores.max(-1)
        some = bool(best.isfinite().all())
        require(some, "logits", "NaN or infinite", "finite somewhere: there is no token to choose")
        if self.generators is not None:
            parts = scores.softmax(-1).split(masked.sum(-1).tolist())
            draws = [p.multinomial(1, generator=self.generators[row]) for p, row in zip(parts, rows, strict=True)]
            chosen = torch.cat(draws)[:, 0]
            best = scores.gather(-1, chosen[:, None])[:, 0]
        tokens = torch.zeros(masked.shape, dtype=torch.long, device=masked.device).masked_scatter(masked, chosen)
        confidences = torch.full(masked.shape, float("-inf"), device=masked.device)
        confidences = confidences.masked_scatter(masked, (best - normaliser).exp())
        accepted = confidences > self.threshold
        fallback = torch.zeros_like(accepted).scatter_(1, confidences.argmax(-1, keepdim=True), True)
        accepted = torch.where(accepted.any(-1, keepdim=True), accepted, fallback & masked)
        return Choice(tokens, accepted, confidences)


# ---- a row and its answer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenoisingStep:
    """What one denoising pass filled in one row.

    `positions` count from the row's first real token. `settled` are the tokens that the answer grew by: those that
    now are known without a gap before them.
    """

    block: int
    step: int
    positions: list[int]
    tokens: list[int]
    confidences: list[float]
    settled: list[int]
    finish_reason: str | None  # of the answer, if it ended with this step


@dataclass
class Answer:
    """One row's new tokens, its end token included, and what they took."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # see `Ends.reason`; None while it is being written
    num_denoising_passes: int = 0
    num_commit_passes: int = 0
    trace: list[DenoisingStep] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """TPF: tokens kept over denoising and commit passes; the prefill is not counted."""
        return len(self.tokens) / (self.num_denoising_passes + self.num_commit_passes)


@dataclass
class Row:
    """A row in progress: a prompt, its answer as far as it is settled, and the block after that."""

    index: int  # in the batch
    prompt: list[int]
    answer: Answer
    start: int = 0  # where the block starts in the row
    block: list[int] = field(default_factory=list)  # T tokens, the mask token where nothing is known
    masked: list[bool] = field(default_factory=list)

    def open_block(self, start: int, size: int, mask_token_id: int) -> None:
        """Masks the block at `start`, but for the tail of the prompt that may lie in it."""
        tail = self.prompt[start : start + size]
        self.start, self.block = start, tail + [mask_token_id] * (size - len(tail))
        self.masked = [False] * len(tail) + [True] * (size - len(tail))

    def fill(self, position: int, token: int) -> None:
        self.block[position], self.masked[position] = token, False

    @property
    def pending(self) -> bool:
        """Whether something of the block is still to be found out."""
        return self.answer.finish_reason is None and any(self.masked)

    @property
    def response(self) -> list[int | None]:
        """The answer, settled or not, to the end of the block; None where nothing is known."""
        first = max(len(self.prompt) - self.start, 0)
        kept = self.answer.tokens[: max(self.start - len(self.prompt), 0)]
        pairs = zip(self.block[first:], self.masked[first:], strict=True)
        return kept + [None if masked else token for token, masked in pairs]

    @property
    def open_positions(self) -> list[int]:
        """The masked positions, counted in the response."""
        return [self.start + i - len(self.prompt) for i, masked in enumerate(self.masked) if masked]


@dataclass(frozen=True)
class Ends:
    """What ends an answer."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    criteria: tuple[tuple[str, Callable[[torch.Tensor, None], bool | torch.Tensor]], ...] = ()  # by finish reason
    deadline: float = float("inf")  # of time.monotonic()

    def reason(self, prompt: list[int], tokens: list[int]) -> str | None:
        """Why an answer ends with its last token: "stop" for an end token, a criterion's name, "length", or None."""
        if tokens[-1] in self.eos_token_ids:
            return "stop"
        if self.criteria:
            text = torch.tensor([prompt + tokens])
            for name, criterion in self.criteria:
                if bool(torch.as_tensor(criterion(text, None)).all()):
                    return name
        return "length" if len(tokens) == self.max_new_tokens else None

    def settle(self, row: Row) -> list[int]:
        """Moves what a row knows without a gap into its answer, up to where the answer ends; returns those tokens."""
        answer, settled = row.answer, []
        while answer.finish_reason is None:
            position = len(row.prompt) + len(answer.tokens) - row.start
            if position == len(row.block) or row.masked[position]:
                break
            settled.append(row.block[position])
            answer.tokens.append(row.block[position])
            answer.finish_reason = self.reason(row.prompt, answer.tokens)
        return settled


# ---- processors: they change the logits of masked positions by what the row says so far ------------------------------

Processor = Callable[
    [torch.Tensor, list[Row]], None
]  # scores (N, V) fp32, changed in place; the rows in the same order


def by_row(scores: torch.Tensor, rows: list[Row]) -> Iterator[tuple[torch.Tensor, Row]]:
    """Each row with the scores (n, V) of its n open positions."""
    return zip(scores.split([sum(row.masked) for row in rows]), rows, strict=True)


def penalise_response(presence: float, frequency: float, repetition: float) -> Processor:
    """Makes what the answer holds already less likely: `presence` off the logit of each such token, `frequency` times
    its count (OpenAI's definitions), and division by `repetition` where the logit is positive, multiplication where
    it is negative (CTRL, arXiv 1909.05858). The prompt does not count; accepted tokens of the block do."""

    def process(scores: torch.Tensor, rows: list[Row]) -> None:
        for part, row in by_row(scores, rows):
            known = torch.tensor([token for token in row.response if token is not None], dtype=torch.long)
            tokens, counts = (x.to(scores.device) for x in known.unique(return_counts=True))
            logits = part[:, tokens]
            logits = torch.where(logits > 0, logits / repetition, logits * repetition)
            part[:, tokens] = logits - presence - frequency * counts

    return process


def ramp(tokens: list[int], start: int, slope: float, max: float, applies: Callable[[Row], bool]) -> Processor:
    """Adds `min(max, slope * (position - start))` to the tokens' logits at positions of the answer after `start`."""

    def process(scores: torch.Tensor, rows: list[Row]) -> None:
        for part, row in by_row(scores, rows):
            if applies(row):
                after = torch.tensor(row.open_positions, device=scores.device) - start
                part[:, tokens] += (slope * after).clamp(0, max)[:, None]

    return process


def ban(tokens: list[int], banned_at: Callable[[Row], list[bool]] | None = None) -> Processor:
    """Makes tokens impossible, at all open positions or at those that `banned_at` says."""

    def process(scores: torch.Tensor, rows: list[Row]) -> None:
        for part, row in by_row(scores, rows):
            where = torch.tensor(banned_at(row) if banned_at else [True] * len(part), device=scores.device)
            part[:, tokens] = part[:, tokens].masked_fill(where[:, None], float("-inf"))

    return process


def by_position(processor: Callable, mask_token_id: int) -> Processor:
    """A processor of autoregressive generation, called for each open position with the tokens before it (1, L), the
    mask token where one is not known yet, and the position's scores (1, V)."""

    def process(scores: torch.Tensor, rows: list[Row]) -> None:
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


def forbid(forbidden: Callable[[list[int | None]], Forbidden]) -> Processor:
    """Bans the tokens that would complete a forbidden sequence."""

    def process(scores: torch.Tensor, rows: list[Row]) -> None:
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

    def since(self, row: Row) -> int | None:
        """Where in the response the open thinking part begins; None if none is open."""
        for i, token in reversed(list(enumerate(row.response))):
            if token in (self.start, self.end):
                return i + 1 if token == self.start else None
        if row.index not in self.in_prompt:
            marks = (token for token in reversed(row.prompt) if token in (self.start, self.end))
            self.in_prompt[row.index] = next(marks, self.end) == self.start
        return 0 if self.in_prompt[row.index] else None

    def close(self, row: Row) -> None:
        """Puts the end of thinking on the first open position from the limit on, if thinking goes on until there."""
        since = self.since(row)
        late = [] if since is None else [p for p in row.open_positions if p >= since + self.limit]
        if late:
            row.fill(late[0] + len(row.prompt) - row.start, self.end)

    def closed_later(self, row: Row) -> list[bool]:
        """For each open position, whether an end of thinking stands after it: there must not be two."""
        ends = [i for i, token in enumerate(row.response) if token == self.end]
        return [bool(ends) and position < ends[-1] for position in row.open_positions]


# ---- the loop --------------------------------------------------------------------------------------------------------


class Prefix(Protocol):
    """The clean tokens before the block, as the model keeps them; one row for each that is still being written."""

    def select(self, rows: torch.Tensor) -> "Prefix":
        """The prefix of some rows, (b,) indices; this one is left as it is."""


class BlockModel(Protocol):
    """The three verbs that the loop drives a model through."""

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Prefix:
        """The prefix of left-padded prompts (B, P); P may be 0."""

    def denoise(self, prefix: Prefix, block: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) of the N masked positions of blocks (B, T); the prefix is left as it is."""

    def commit(self, prefix: Prefix, block: torch.Tensor) -> Prefix:
        """The prefix with resolved blocks (B, T) added; the one given is used up."""


StepCallback = Callable[[int, DenoisingStep, list[int]], None]


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows of unequal lengths as one (B, P) tensor padded on the left, and its mask (B, P)."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return tuple(torch.tensor(x, dtype=torch.long, device=device).view(len(rows), width) for x in (ids, mask))


def block_diffusion(
    model: BlockModel,
    prompts: list[torch.Tensor],
    choose: LowConfidence,
    block_size: int,
    ends: Ends,
    max_denoising_steps: int | None = None,
    callback: StepCallback | None = None,
    processors: tuple[Processor, ...] = (),
    forbidden: Callable[[list[int | None]], Forbidden] | None = None,
    prepare: Callable[[Row], None] = lambda row: None,
    **denoise_options,
) -> list[Answer]:
    """Writes an answer to each prompt. The rows share passes and nothing else.

    A row whose block is resolved waits, out of the batch, until the others' are; a row that has its whole answer
    leaves for good. Only whole blocks are committed, and the last one of an answer is not.

    Args:
        prompts: 1-D token ids, one or more each.
        max_denoising_steps: after so many passes over a block, all that is still masked is accepted; None: no limit
            (a block takes at most `block_size`).
        callback: called after each step with the row, the step and the block's tokens, masks included.
        forbidden: the sequences that an answer with this response must not hold. prepare: may fill positions of a
            row before each pass.
        denoise_options: further arguments of `model.denoise`.
    """
    device = prompts[0].device
    answers = [Answer() for _ in prompts]
    rows = [Row(i, p.tolist(), answers[i]) for i, p in enumerate(prompts)]
    reported = [0] * len(rows)  # tokens of each answer that a step has named
    for row in rows:
        row.start = len(row.prompt) // block_size * block_size
    prefix = model.prefill(*left_padded([row.prompt[: row.start] for row in rows], device))
    while rows:
        for row in rows:
            row.open_block(row.start, block_size, choose.mask_token_id)
            prepare(row)
            ends.settle(row)
        step, active, active_prefix = 0, rows, prefix
        while pending := [row for row in active if row.pending]:
            if len(pending) < len(active):
                kept = [i for i, row in enumerate(rows) if row.pending]
                active, active_prefix = pending, prefix.select(torch.tensor(kept, device=device))
            block = torch.tensor([row.block for row in active], device=device)
            masked = torch.tensor([row.masked for row in active], device=device)
            scores = model.denoise(active_prefix, block, masked, **denoise_options)
            if processors:
                scores = scores.to(torch.float32, copy=True)
                for process in processors:
                    process(scores, active)
            choice = choose(scores, masked, [row.index for row in active])
            accepted = masked if step + 1 == max_denoising_steps else choice.accepted
            for row, tokens, confidences, chosen in zip(
                active, choice.tokens.tolist(), choice.confidences.tolist(), accepted.tolist(), strict=True
            ):
                filled = [i for i, is_chosen in enumerate(chosen) if is_chosen]
                if forbidden is not None:
                    first = row.start - len(row.prompt)  # of the block, in the response
                    surest = sorted(filled, key=lambda i: -confidences[i])
                    kept = forbidden(row.response).allowed([(first + i, tokens[i]) for i in surest])
                    filled = [i for i in filled if first + i in kept]
                for i in filled:
                    row.fill(i, tokens[i])
                prepare(row)
                ends.settle(row)
                row.answer.num_denoising_passes += 1
                record = DenoisingStep(
                    block=row.start // block_size,
                    step=step,
                    positions=[row.start + i for i in filled],
                    tokens=[tokens[i] for i in filled],
                    confidences=[confidences[i] for i in filled],
                    settled=row.answer.tokens[reported[row.index] :],
                    finish_reason=row.answer.finish_reason,
                )
                reported[row.index] = len(row.answer.tokens)
                row.answer.trace.append(record)
                if callback is not None:
                    callback(row.index, record, list(row.block))
            if time.monotonic() > ends.deadline:
                for row in rows:
                    row.answer.finish_reason = row.answer.finish_reason or "time"
            step += 1
        going_on = [i for i, row in enumerate(rows) if row.answer.finish_reason is None]
        if going_on:
            prefix = prefix if len(going_on) == len(rows) else prefix.select(torch.tensor(going_on, device=device))
            rows = [rows[i] for i in going_on]
            prefix = model.commit(prefix, torch.tensor([row.block for row in rows], device=device))
            for row in rows:
                row.answer.num_commit_passes += 1
                row.start += block_size
        else:
            rows = []
    return answers


# ---- generate() ------------------------------------------------------------------------------------------------------

BLOCK_FIELDS = {  # with what they are when nobody says
    "block_size": None,
    "threshold": 0.95,
    "max_denoising_steps": None,
    "decoding": "low_confidence",
    "expert_coreset_top_p": None,
    "output_trace": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop_ramp": None,
    "think_end_ramp": None,
    "think_start_token_id": None,
    "think_end_token_id": None,
    "max_thinking_tokens": None,
}
SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p"}


class CloverGenerationConfig(GenerationConfig):
    r"""
    How to decode. Precedence: arguments of `generate()`, then a `generation_config` passed to it, then the model's,
    then the defaults here.

    Args:
        decoding (`str`, defaults to "low_confidence"): by blocks; or "autoregressive": transformers' own generation
            over the causal pass, with all of its options and none of the ones here.
        block_size (`int`, defaults to the model's): positions denoised together, at least 1.
        threshold (`float`, defaults to 0.95): confidence above which a token is accepted, in [0, 1]. At 1.0 every
            pass accepts one token.
        max_denoising_steps (`int`, *optional*): passes over a block after which all that is masked is accepted.
        expert_coreset_top_p (`float`, *optional*): overrides the model's; see `CloverConfig`.
        output_trace (`bool`, defaults to False): return what each denoising pass filled.
        presence_penalty, frequency_penalty (`float`, default to 0): taken off the logits of tokens that the answer
            holds, once or times their count. repetition_penalty (`float`, defaults to 1): CTRL's. All three look at
            the response alone, accepted tokens of the block included.
        stop_ramp, think_end_ramp (`dict`, *optional*): `{"start", "slope", "max"}`, a bonus of
            `min(max, slope * (position - start))` on the end tokens, or on the end of thinking while it is open, at
            positions of the answer after `start`.
        think_start_token_id, think_end_token_id (`int`, *optional*): the marks of a thinking part.
        max_thinking_tokens (`int`, *optional*): after so many the thinking part is closed, on the first position
            that is still open then; 0 leaves it empty.
        do_sample, temperature, top_k, top_p, min_p: as in transformers, at every masked position; 0 is greedy.
        no_repeat_ngram_size, bad_words_ids, suppress_tokens, min_new_tokens: as in transformers; of the response.
        stop_strings, max_time, max_new_tokens, max_length: what ends an answer; without a budget it may fill the
            context. `max_time` is looked at after each pass.
        num_return_sequences, eos_token_id (`int` or list), pad_token_id, return_dict_in_generate: as in transformers.

    Raises:
        ValueError: a value is not allowed, or a field of transformers is set that block diffusion does not use.
    """

    def __init__(self, **kwargs):
        for name in BLOCK_FIELDS:
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)

    @staticmethod
    def _get_default_generation_params() -> dict:
        defaults = GenerationConfig._get_default_generation_params()
        del defaults["max_length"]  # transformers' 20 tokens are less than a block
        return defaults | {name: value for name, value in BLOCK_FIELDS.items() if value is not None}

    @classmethod
    def from_model_config(cls, model_config) -> "CloverGenerationConfig":
        """The token ids of a model's config; the parent would look up our fields on its own class and fail."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        config = cls(**{name: getattr(model_config, name, None) for name in names})
        config._original_object_hash = hash(config)
        return config

    def validate(self, *args, **kwargs):
        validate_block_fields(self)
        super().validate(*args, **kwargs)


def validate_block_fields(config: object) -> None:
    """Raises a `ValueError` for a value that block diffusion does not allow; fields that are unset or absent pass."""
    number, always = (int, float), lambda value: True

    def check(name: str, kind: type | tuple[type, ...], allowed: str, test: Callable[[object], bool] = always) -> None:
        value = getattr(config, name, None)
        well_typed = isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
        require(value is None or (well_typed and test(value)), name, value, allowed)

    check("block_size", int, "an integer of at least 1", lambda value: value >= 1)
    check("threshold", number, "a number in [0, 1]", lambda value: 0 <= value <= 1)
    check("max_denoising_steps", int, "null or an integer of at least 1", lambda value: value >= 1)
    check("decoding", str, '"low_confidence" or "autoregressive"', lambda v: v in ("low_confidence", "autoregressive"))
    check("expert_coreset_top_p", number, "null or a number in (0, 1]", lambda value: 0 < value <= 1)
    for name in ("output_trace", "return_dict_in_generate", "do_sample"):
        check(name, bool, "true or false")
    for name in ("max_new_tokens", "max_length", "num_return_sequences"):
        check(name, int, "an integer of at least 1", lambda value: value >= 1)
    for name in ("max_thinking_tokens", "no_repeat_ngram_size", "top_k", "min_new_tokens"):
        check(name, int, "an integer of at least 0", lambda value: value >= 0)
    for name in ("presence_penalty", "frequency_penalty"):
        check(name, number, "a finite number", lambda value: abs(value) < float("inf"))
    for name in ("repetition_penalty", "max_time"):
        check(name, number, "a number above 0", lambda value: 0 < value < float("inf"))
    check("temperature", number, "a number of at least 0", lambda value: 0 <= value < float("inf"))
    check("top_p", number, "a number in (0, 1]", lambda value: 0 < value <= 1)
    check("min_p", number, "a number in [0, 1]", lambda value: 0 <= value <= 1)
    for name in ("stop_ramp", "think_end_ramp"):
        check(name, dict, '{"start", "slope", "max"}, three numbers', _is_ramp)
    for name in ("pad_token_id", "think_start_token_id", "think_end_token_id"):
        check(name, int, "a token id")
    ids = getattr(config, "eos_token_id", None)
    require(ids is None or _is_ids(ids) or _is_ids([ids]), "eos_token_id", ids, "a token id or a list of them")
    check("suppress_tokens", list, "a list of token ids", _is_ids)
    check("bad_words_ids", list, "a list of words, each a list of token ids", lambda v: all(map(_is_ids, v)) and all(v))
    words = getattr(config, "stop_strings", None)
    listed = [words] if isinstance(words, str) else words or []
    well_typed = isinstance(listed, list) and all(isinstance(word, str) and word for word in listed)
    require(well_typed, "stop_strings", words, "a string or a list of them, none empty")


def _is_ids(value: object) -> bool:
    numbers = isinstance(value, list | tuple) and all(isinstance(token, int) and token >= 0 for token in value)
    return numbers and not any(isinstance(token, bool) for token in value)


def _is_ramp(value: dict) -> bool:
    return set(value) == {"start", "slope", "max"} and all(type(number) in (int, float) for number in value.values())


USED_FIELDS = set(BLOCK_FIELDS) | SAMPLING_FIELDS | {"do_sample", "repetition_penalty", "no_repeat_ngram_size"}
USED_FIELDS |= {"bad_words_ids", "suppress_tokens", "min_new_tokens", "stop_strings", "max_time", "max_new_tokens"}
USED_FIELDS |= {"max_length", "num_return_sequences", "eos_token_id", "pad_token_id", "return_dict_in_generate"}
ARGUMENTS = {"inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria"}
ARGUMENTS |= {"streamer", "tokenizer", "generator", "callback"}
ANY_VALUE = {"bos_token_id", "transformers_version", "_from_model_config"}  # describe a model, ask for nothing


def refuse_unused(config: GenerationConfig, arguments: dict) -> None:
    """Nothing is silently ignored: raises a `ValueError` for what block diffusion has no use for."""
    neutral = GenerationConfig._get_default_generation_params()
    names = sorted(USED_FIELDS | ARGUMENTS)
    for name, value in arguments.items():
        if value is not None:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(names)}."
            raise ValueError(f"`{name}` is not an argument of block-diffusion generate(): {hint}")
    for name, value in config.to_dict().items():
        if name in USED_FIELDS or name in ANY_VALUE or value is None or value == neutral.get(name):
            continue
        off = value is False and neutral.get(name) is None
        require(off, name, value, f"unset ({neutral.get(name)}): block-diffusion generate() does not use it")


def refuse_contradictions(config: GenerationConfig, arguments: dict) -> None:
    """Raises a `ValueError` for options that are allowed, but not together. `arguments` are those of this call: what a
    model's own config says about sampling does no harm to a greedy call."""
    greedy = not config.do_sample or config.temperature == 0
    for name in sorted(SAMPLING_FIELDS & set(arguments)):
        neutral = arguments[name] in (None, GenerationConfig._get_default_generation_params().get(name), 0)
        require(neutral or not greedy, name, arguments[name], "unset where `do_sample` is false or temperature 0")
    many = config.num_return_sequences
    require(many == 1 or not greedy, "num_return_sequences", many, "1 without `do_sample=True`: answers would be equal")
    require(
        config.return_dict_in_generate or not config.output_trace,
        "output_trace",
        True,
        "used with `return_dict_in_generate=True`",
    )
    sequences = config.no_repeat_ngram_size or any(len(word) > 1 for word in config.bad_words_ids or [])
    steps = config.max_denoising_steps
    require(
        not (sequences and steps),
        "max_denoising_steps",
        steps,
        "unset with `no_repeat_ngram_size` or bad words of several tokens: what they forbid takes further passes",
    )
    for name in ("think_end_ramp", "max_thinking_tokens"):
        marks = (config.think_start_token_id, config.think_end_token_id)
        known = getattr(config, name) is None or None not in marks
        require(known, name, getattr(config, name), "unset where `think_start_token_id` or `think_end_token_id` is")


def check_tools(
    config: GenerationConfig, callback, generator, logits_processor, stopping_criteria, streamer, tokenizer
):
    """Raises a `ValueError` for an object of the wrong kind, or one that would not be used."""
    require(callback is None or callable(callback), "callback", callback, "a function of row, step and block")
    for name, given in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        listed = given is None or (isinstance(given, list | tuple) and all(map(callable, given)))
        require(listed, name, given, "a list of callables")
    streams = streamer is None or (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    )
    require(streams, "streamer", type(streamer).__name__, "an object with `put` and `end`")
    kind = generator is None or isinstance(generator, torch.Generator)
    require(kind, "generator", type(generator).__name__, "a torch.Generator")
    draws = config.do_sample and config.temperature != 0
    require(generator is None or draws, "generator", "given", "unset unless `do_sample=True`")
    needed = config.stop_strings is None or tokenizer is not None
    require(needed, "stop_strings", config.stop_strings, "used with `tokenizer=`, the model's tokenizer")


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
        found.append(ban([thinking.end], thinking.closed_later))
    if config.no_repeat_ngram_size or config.bad_words_ids:
        found.append(forbid(forbidden_of(config)))
    return found + [by_position(processor, mask_token_id) for processor in user]


def forbidden_of(config: GenerationConfig) -> Callable[[list[int | None]], Forbidden] | None:
    """The sequences that a config forbids, given a response; None if it forbids none."""
    words, ngram = [list(word) for word in config.bad_words_ids or []], config.no_repeat_ngram_size or 0
    return (lambda response: Forbidden(words, ngram, response)) if words or ngram else None


def filters_of(config: GenerationConfig) -> tuple[LogitsProcessor, ...]:
    """transformers' filters of a distribution, in its order."""
    kinds = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return tuple(kinds[n](getattr(config, n)) for n in kinds if getattr(config, n) not in (None, off[n]))


def row_generators(count: int, base: torch.Generator | None, device: torch.device) -> tuple[torch.Generator, ...]:
    """A generator for each row, seeded one after the other, so that a row draws the same whatever comes after it."""
    seeds = [int(torch.randint(2**62, (), generator=base, device=base.device if base else "cpu")) for _ in range(count)]
    return tuple(torch.Generator(device).manual_seed(seed) for seed in seeds)


class Streaming:
    """Gives a transformers streamer the prompt, then an answer as it settles, in order; and to one that shows drafts
    (`put_draft`, as transformers' TextDiffusionStreamer) the rest of the block in progress, masks included."""

    def __init__(self, streamer, prompt: torch.Tensor, mask_token_id: int):
        self.streamer, self.mask_token_id, self.sent = streamer, mask_token_id, 0
        streamer.put(prompt.cpu())

    def __call__(self, row: int, step: DenoisingStep, block: list[int]) -> None:
        self._put(step.settled)
        if hasattr(self.streamer, "put_draft") and step.finish_reason is None and self.mask_token_id in block:
            self.streamer.put_draft(torch.tensor(block[block.index(self.mask_token_id) :]))

    def _put(self, tokens: list[int]) -> None:
        if tokens:
            self.streamer.put(torch.tensor(tokens))
            self.sent += len(tokens)

    def end(self, answer: Answer) -> None:
        self._put(answer.tokens[self.sent :])  # what was filled in without a pass
        self.streamer.end()


@dataclass
class CloverGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(return_dict_in_generate=True)` returns.

    Args:
        sequences (B, P + new): prompts and answers, padded on the right after an answer's end.
        finish_reason: per row "stop" (an end token), "stop_string", "stopping_criteria", "time" or "length".
        num_denoising_passes, num_commit_passes: per row. The prefill is not counted.
        tokens_per_forward: per row, tokens kept over denoising and commit passes.
        trace: per row the list of its `DenoisingStep`s, if `output_trace`.
    """

    finish_reason: list[str] | None = None
    num_denoising_passes: list[int] | None = None
    num_commit_passes: list[int] | None = None
    tokens_per_forward: list[float] | None = None
    trace: list[list[DenoisingStep]] | None = None


class CloverGenerationMixin(GenerationMixin):
    """`generate()` by block diffusion, for a model that has the three verbs of `BlockModel`."""

    generation_config_class = CloverGenerationConfig

    def adjust_generation_fn(self, generation_config, from_auto_class, from_pipeline, path, *args, **kwargs):
        """Called when a model is loaded. The parent's would read the file as a plain GenerationConfig, which drops
        our fields from a config that was made from a model's."""
        if generation_config is not None:
            self.generation_config = CloverGenerationConfig.from_dict(generation_config.to_dict())
        elif path is not None:
            kwargs.pop("trust_remote_code", None)
            try:
                self.generation_config = CloverGenerationConfig.from_pretrained(path, *args, **kwargs)
            except OSError:
                pass  # no such file: the one made from the model's config stays

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: list | None = None,
        stopping_criteria: list | None = None,
        streamer=None,
        tokenizer=None,
        generator: torch.Generator | None = None,
        callback: StepCallback | None = None,
        **kwargs,
    ) -> torch.Tensor | CloverGenerateOutput:
        """Answers prompts by block diffusion.

        Args:
            inputs, or `input_ids` (B, P): prompts of at least one token, padded on the left.
            attention_mask (B, P): 0 on padding; by default inferred from the pad token, as in transformers.
            generation_config: see `CloverGenerationConfig`; its fields may be given as arguments too.
            logits_processor: transformers' processors, called for each masked position with the tokens before it
                (1, L), the mask token where one is unknown, and its logits (1, V).
            stopping_criteria: transformers' criteria, called for each row alone, on prompt and answer (1, L) after
                each of the answer's tokens, as in autoregressive generation.
            streamer: transformers' streamers; one prompt only. tokenizer: needed by `stop_strings`.
            generator: where sampling gets its randomness; by default torch's global one, as `manual_seed` sets it.
            callback: `callback(row, step, block)` after each denoising pass, for each row in it: a `DenoisingStep`
                and the block's token ids, the mask token where nothing is filled yet.
        Returns:
            (B, P + new) prompts and answers, rows that end early padded on the right; or a `CloverGenerateOutput`.
        Raises:
            ValueError: before any work, naming the field and what is allowed: an unknown or unused argument, a value
                out of range, no mask token, a prompt that is empty, padded on the right, or too long with its answer.
        """
        input_ids = kwargs.pop("input_ids", None)
        require(inputs is None or input_ids is None, "inputs", "given", "unset where `input_ids` is given")
        prompts = inputs if inputs is not None else input_ids
        attention_mask = kwargs.pop("attention_mask", None)
        is_config = generation_config is None or isinstance(generation_config, GenerationConfig)
        require(is_config, "generation_config", type(generation_config).__name__, "a GenerationConfig")
        for source in (self.generation_config, generation_config, SimpleNamespace(**kwargs)):
            validate_block_fields(source)  # before they are merged, which trips over values of the wrong kind
        config, unknown = self._prepare_generation_config(generation_config, **kwargs)
        tools = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        tools |= {"streamer": streamer, "tokenizer": tokenizer}
        if config.decoding == "autoregressive":
            require(callback is None, "callback", callback, "unset: autoregressive decoding has no denoising passes")
            require(generator is None, "generator", generator, "unset: transformers draws from torch's global one")
            for name in sorted(set(kwargs) & set(BLOCK_FIELDS) - {"decoding"}):
                require(kwargs[name] is None, name, kwargs[name], "unset with `decoding='autoregressive'`")
            return self._autoregressive(prompts, attention_mask, config, unknown | tools)
        refuse_unused(config, unknown)
        refuse_contradictions(config, kwargs)
        check_tools(config, callback=callback, generator=generator, **tools)
        # There transformers turns caches off. (Its own property for this warns in newer versions.)
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in self.modules())
        caches = not (self.training and checkpointing)
        require(caches, "model.training", True, "false with gradient checkpointing: call `model.eval()` first")
        mask_token_id = self.config.mask_token_id
        require(
            mask_token_id is not None,
            "mask_token_id",
            mask_token_id,
            "set to denoise: `model.config.mask_token_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)`. The 35B "
            "release's mask token is not publicly known, so its config.json leaves it unset",
        )
        is_mask = attention_mask is None or isinstance(attention_mask, torch.Tensor)
        require(is_mask, "attention_mask", type(attention_mask).__name__, "a tensor")
        is_batch = isinstance(prompts, torch.Tensor) and prompts.ndim == 2 and len(prompts) > 0
        require(is_batch, "input_ids", _kind(prompts), "a (B, P) tensor of at least one row")
        integral = not prompts.is_floating_point() and prompts.dtype != torch.bool
        require(integral, "input_ids", str(prompts.dtype), "integer token ids")
        self._prepare_special_tokens(config, attention_mask is not None, device=prompts.device)
        if attention_mask is None:
            attention_mask = self._prepare_attention_mask_for_generation(prompts, config, {})
        rows = self._real_tokens(prompts, attention_mask)
        copies = config.num_return_sequences
        prompts, rows = prompts.repeat_interleave(copies, dim=0), [row for row in rows for _ in range(copies)]
        require(
            streamer is None or len(rows) == 1, "streamer", f"given for {len(rows)} answers", "used with one prompt"
        )
        eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        criteria = [("stopping_criteria", criterion) for criterion in stopping_criteria or []]
        if config.stop_strings:
            criteria.append(("stop_string", StopStringCriteria(tokenizer, config.stop_strings)))
        ends = Ends(
            max_new_tokens=self._budget(config, prompts.shape[1], max(len(row) for row in rows)),
            eos_token_ids=tuple(eos),
            criteria=tuple(criteria),
            deadline=float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        )
        sampling = config.do_sample and config.temperature != 0
        choose = LowConfidence(config.threshold, mask_token_id)
        if sampling:
            generators = row_generators(len(rows), generator, prompts.device)
            temperature = 1.0 if config.temperature is None else config.temperature
            choose = LowConfidence(config.threshold, mask_token_id, temperature, filters_of(config), generators)
        limit = config.max_thinking_tokens
        thinking = Thinking(config.think_start_token_id, config.think_end_token_id, limit)
        options = {} if limit is None else {"prepare": thinking.close}
        callbacks = [] if callback is None else [callback]
        if streamer is not None:
            streaming = Streaming(streamer, prompts, mask_token_id)
            callbacks.append(streaming)
        answers = block_diffusion(
            self,
            rows,
            choose,
            block_size=self.config.block_size if config.block_size is None else config.block_size,
            ends=ends,
            max_denoising_steps=config.max_denoising_steps,
            callback=(lambda *step: [tell(*step) for tell in callbacks]) if callbacks else None,
            processors=tuple(processors_of(config, eos, logits_processor or [], mask_token_id)),
            forbidden=forbidden_of(config),
            expert_coreset_top_p=config.expert_coreset_top_p,
            **options,
        )
        if streamer is not None:
            streaming.end(answers[0])
        pad = 0 if config._pad_token_tensor is None else config._pad_token_tensor.item()
        width = max(len(answer.tokens) for answer in answers)
        written = [answer.tokens + [pad] * (width - len(answer.tokens)) for answer in answers]
        sequences = torch.cat([prompts, torch.tensor(written, dtype=prompts.dtype, device=prompts.device)], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return CloverGenerateOutput(
            sequences=sequences,
            finish_reason=[answer.finish_reason for answer in answers],
            num_denoising_passes=[answer.num_denoising_passes for answer in answers],
            num_commit_passes=[answer.num_commit_passes for answer in answers],
            tokens_per_forward=[answer.tokens_per_forward for answer in answers],
            trace=[answer.trace for answer in answers] if config.output_trace else None,
        )

    def _autoregressive(self, prompts, attention_mask, config: GenerationConfig, arguments: dict):
        """transformers' own generation over the causal pass; an answer may fill the context here too."""
        fields = {name: value for name, value in config.to_dict().items() if name not in BLOCK_FIELDS}
        if config.max_new_tokens is None and config.max_length is None:
            fields["max_new_tokens"] = self.config.max_position_embeddings - prompts.shape[1]
        return super().generate(
            prompts, generation_config=GenerationConfig(**fields), attention_mask=attention_mask, **arguments
        )

    def _real_tokens(self, prompts: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
        """The prompts without their padding."""
        shape = tuple(attention_mask.shape)
        require(shape == tuple(prompts.shape), "attention_mask", shape, f"of the prompts' shape {tuple(prompts.shape)}")
        real = attention_mask.bool()
        lengths = real.sum(-1)
        require(bool((lengths > 0).all()), "input_ids", "an empty prompt", "at least one token in every row")
        left = bool((real.long().diff(dim=-1) >= 0).all())
        require(left, "attention_mask", "padded on the right or inside", "padded on the left: `padding_side='left'`")
        rows = [row[-length:].long() for row, length in zip(prompts, lengths.tolist(), strict=True)]
        for row in rows:
            inside = 0 <= int(row.min()) and int(row.max()) < self.config.vocab_size
            require(inside, "input_ids", [int(row.min()), int(row.max())], f"in [0, {self.config.vocab_size})")
        return rows

    def _budget(self, config: GenerationConfig, columns: int, longest: int) -> int:
        """New tokens that may be written, checked against the context."""
        context = self.config.max_position_embeddings
        budget = config.max_new_tokens
        if budget is None and config.max_length is not None:
            budget = config.max_length - columns
            require(budget >= 1, "max_length", config.max_length, f"more than the prompt's {columns} columns")
        if budget is None:
            budget = context - longest
            require(budget >= 1, "input_ids", f"{longest} tokens", f"shorter than the context of {context}")
        require(
            longest + budget <= context,
            "max_new_tokens",
            budget,
            f"at most {context - longest}: prompt ({longest}) and answer share a context of {context} tokens",
        )
        return budget


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


__all__ = [
    "Answer",
    "BlockModel",
    "Ends",
    "CloverGenerateOutput",
    "CloverGenerationConfig",
    "CloverGenerationMixin",
    "DenoisingStep",
    "LowConfidence",
    "block_diffusion",
]
