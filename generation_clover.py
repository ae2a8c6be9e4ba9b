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

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessor, LogitsProcessorList, StopStringCriteria
from transformers.utils import logging

from .configuration_clover import require
from .controls_clover import Processor, RulesOf, close_thinking, filters_of, marks_of, processors_of, rules_of
from .options_clover import (
    BLOCK_FIELDS,
    CloverGenerationConfig,
    check_token_ids,
    check_tools,
    eos_ids,
    limit_by,
    refuse_contradictions,
    refuse_unused,
    validate_block_fields,
)

logger = logging.get_logger(__name__)
# transformers 5.24 renamed the argument; the old name still works there, with a warning at every call.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

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
    num_commit_passes: int = 0  # verifying passes count as such
    trace: list[DenoisingStep] = field(default_factory=list)
    prefix: "Prefix | None" = None  # of the block that it ends in, if it was to be kept
    text: torch.Tensor | None = None  # (1, P + budget) prompt and answer for criteria, filled as the answer grows

    @property
    def tokens_per_forward(self) -> float:
        """TPF: tokens kept over denoising and commit passes, the prefill not counted; tokens, if no pass was needed."""
        return len(self.tokens) / max(1, self.num_denoising_passes + self.num_commit_passes)


@dataclass
class Row:
    """A row in progress: a prompt, its answer as far as it is settled, and the block after that."""

    index: int  # in the batch
    prompt: list[int]
    answer: Answer
    start: int = 0  # where the block starts in the row
    block: list[int] = field(default_factory=list)  # T tokens, the mask token where nothing is known
    masked: list[bool] = field(default_factory=list)
    held_from: int | None = None  # from here on the block is not to be filled yet
    reported: int = 0  # tokens of the answer that a step has named as settled

    def open_block(self, start: int, size: int, mask_token_id: int) -> None:
        """Masks the block at `start`, but for the tail of the prompt that may lie in it."""
        tail = self.prompt[start : start + size]
        self.start, self.block = start, tail + [mask_token_id] * (size - len(tail))
        self.masked = [False] * len(tail) + [True] * (size - len(tail))
        self.held_from = None

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
    def open(self) -> list[bool]:
        """The masked positions that can be filled now."""
        end = len(self.block) if self.held_from is None else self.held_from
        return [masked and i < end for i, masked in enumerate(self.masked)]

    @property
    def open_positions(self) -> list[int]:
        """The same, counted in the response."""
        return [self.start + i - len(self.prompt) for i, is_open in enumerate(self.open) if is_open]


@dataclass(frozen=True)
class Ends:
    """What ends an answer."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    criteria: tuple[tuple[str, Callable[[torch.Tensor, None], bool | torch.Tensor]], ...] = ()  # by finish reason
    deadline: float = float("inf")  # of time.monotonic()

    def reason(self, prompt: list[int], answer: Answer) -> str | None:
        """Why an answer ends with its last token: "stop" for an end token, a criterion's name, "length", or None."""
        count = len(answer.tokens)
        if answer.tokens[-1] in self.eos_token_ids:
            return "stop"
        if self.criteria:
            if answer.text is None:
                answer.text = torch.tensor([prompt + [0] * self.max_new_tokens])
            answer.text[0, len(prompt) + count - 1] = answer.tokens[-1]
            for name, criterion in self.criteria:
                verdict = criterion(answer.text[:, : len(prompt) + count], None)
                single = isinstance(verdict, bool) or (isinstance(verdict, torch.Tensor) and verdict.numel() == 1)
                require(single, name, verdict, "to return true or false, or a tensor of one")
                if bool(verdict):
                    return name
        return "length" if count == self.max_new_tokens else None

    def expire(self, answer: Answer) -> None:
        """Ends an answer whose time is up."""
        if answer.finish_reason is None and time.monotonic() > self.deadline:
            answer.finish_reason = "time"

    def settle(self, row: Row) -> list[int]:
        """Moves what a row knows without a gap into its answer, up to where the answer ends; returns those tokens."""
        answer, settled = row.answer, []
        while answer.finish_reason is None:
            position = len(row.prompt) + len(answer.tokens) - row.start
            if position == len(row.block) or row.masked[position]:
                break
            settled.append(row.block[position])
            answer.tokens.append(row.block[position])
            answer.finish_reason = self.reason(row.prompt, answer)
        return settled


# ---- the loop --------------------------------------------------------------------------------------------------------


class Prefix(Protocol):
    """The clean tokens before the block, as the model keeps them; one row for each that is still being written."""

    def select(self, rows: torch.Tensor) -> "Prefix":
        """The prefix of some rows, (b,) indices; this one is left as it is."""

    def packed(self) -> "Prefix":
        """The same without columns that no row needs."""


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


def without_conflicts(
    row: Row, filled: list[int], tokens: list[int], confidences: list[float], rules_of: RulesOf, first: int | None
) -> list[int]:
    """The positions whose tokens break no rule together: the token `first` is put first, then the surest ones."""
    offset = row.start - len(row.prompt)  # of the block, in the response
    order = sorted(filled, key=lambda i: (tokens[i] != first, -confidences[i]))
    rules, kept = rules_of(row), []
    for i in order:
        if all(rule.allows(offset + i, tokens[i]) for rule in rules):
            for rule in rules:
                rule.put(offset + i, tokens[i])
            kept.append(i)
    # Where a processor of the user's leaves only what is forbidden, it has the last word, as in transformers.
    return sorted(kept) or order[:1]


def fill(
    row: Row,
    step: int,
    filled: list[int],
    tokens: list[int],
    confidences: list[float],
    prepare: Callable[[Row], None],
    ends: Ends,
) -> DenoisingStep:
    """Fills positions of a row's block after a pass, lets its answer grow, and returns the step's record."""
    for i in filled:
        row.fill(i, tokens[i])
    prepare(row)
    ends.settle(row)
    ends.expire(row.answer)
    row.answer.num_denoising_passes += 1
    record = DenoisingStep(
        block=row.start // len(row.block),
        step=step,
        positions=[row.start + i for i in filled],
        tokens=[tokens[i] for i in filled],
        confidences=[confidences[i] for i in filled],
        settled=row.answer.tokens[row.reported :],
        finish_reason=row.answer.finish_reason,
    )
    row.reported = len(row.answer.tokens)
    row.answer.trace.append(record)
    return record


def block_diffusion(
    model: BlockModel,
    prompts: list[torch.Tensor],
    choose: LowConfidence,
    block_size: int,
    ends: Ends,
    max_denoising_steps: int | None = None,
    callback: StepCallback | None = None,
    processors: tuple[Processor, ...] = (),
    rules_of: RulesOf | None = None,
    first: int | None = None,
    prepare: Callable[[Row], None] = lambda row: None,
    prefix: Prefix | None = None,
    keep_prefixes: bool = False,
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
        rules_of: what a row's answer must not hold; of tokens accepted together, `first` is looked at first.
        prepare: may fill positions of a row before each pass, or hold some back.
        prefix: of an earlier answer, to whole blocks that the prompts begin with; it is left as it is.
        keep_prefixes: give each answer the prefix of the block that it ends in.
        denoise_options: further arguments of `model.denoise`.
    """
    device = prompts[0].device
    answers = [Answer() for _ in prompts]
    rows = [Row(i, p.tolist(), answers[i]) for i, p in enumerate(prompts)]
    for row in rows:
        row.start = len(row.prompt) // block_size * block_size
    whole_blocks = left_padded([row.prompt[: row.start] for row in rows], device)
    prefix = model.prefill(*whole_blocks) if prefix is None else model.prefill(*whole_blocks, prefix)
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
            masked = torch.tensor([row.open for row in active], device=device)
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
                if rules_of is not None:
                    filled = without_conflicts(row, filled, tokens, confidences, rules_of, first)
                record = fill(row, step, filled, tokens, confidences, prepare, ends)
                if callback is not None:
                    callback(row.index, record, list(row.block))
            step += 1
        going_on = [i for i, row in enumerate(rows) if row.answer.finish_reason is None]
        for i, row in enumerate(rows):
            if keep_prefixes and i not in going_on:
                row.answer.prefix = prefix.select(torch.tensor([i], device=device)).packed()
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

    def abort(self) -> None:
        """Lets go of whoever waits for the text; why it ends early is raised elsewhere."""
        with suppress(Exception):
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
        mean_accepted_length: per row, tokens gained by a verifying pass; "self_speculative" only.
        trace: per row the list of its `DenoisingStep`s, if `output_trace`.
        past_key_values, which transformers 5.24 calls cache: per row the prefix of the block that its answer ends in;
            `generate(past_key_values=...)` takes it back, with a prompt that begins with the same tokens.
    """

    finish_reason: list[str] | None = None
    num_denoising_passes: list[int] | None = None
    num_commit_passes: list[int] | None = None
    tokens_per_forward: list[float] | None = None
    mean_accepted_length: list[float] | None = None
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
            past_key_values, or `cache`: what an earlier answer returned; the prompt, whole, has to begin with the
                tokens it is of, and only what follows them is run. One prompt only; left as it is.
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
        config, asked, unknown = self._merged(generation_config, kwargs)
        caches = {name: unknown.pop(name, None) for name in ("past_key_values", "cache")}
        caches = {name: cache for name, cache in caches.items() if cache is not None}
        require(len(caches) < 2, "cache", "given", "unset where `past_key_values` is given: they are one argument")
        tools = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        tools |= {"streamer": streamer, "tokenizer": tokenizer}
        if config.decoding != "autoregressive":
            refuse_unused(config, unknown)
        refuse_contradictions(config, asked, kwargs)
        check_tools(config, callback=callback, generator=generator, **tools)
        check_token_ids(config, self.config.vocab_size, self.config.mask_token_id)
        if config.decoding == "autoregressive":
            return self._autoregressive(prompts, attention_mask, config, unknown | caches | tools)
        self._check_that_it_can_denoise()
        rows = self._prompt_rows(prompts, attention_mask, config)
        budget = self._budget(config, prompts.shape[1], max(len(row) for row in rows))
        copies = config.num_return_sequences
        prompts, rows = prompts.repeat_interleave(copies, dim=0), [row for row in rows for _ in range(copies)]
        require(
            streamer is None or len(rows) == 1, "streamer", f"given for {len(rows)} answers", "used with one prompt"
        )
        prefix = None
        for name, cache in caches.items():
            prefix = self._fitting(name, cache, rows, config)
        if config.block_size not in (None, self.config.block_size) and config.decoding == "low_confidence":
            logger.warning_once(
                f"`block_size` is {config.block_size}, but this model was trained with {self.config.block_size}: "
                "answers will differ, and usually be worse."
            )
        criteria = [("stopping_criteria", criterion) for criterion in stopping_criteria or []]
        if config.stop_strings:
            criteria.append(("stop_string", StopStringCriteria(tokenizer, config.stop_strings)))
        ends = Ends(
            max_new_tokens=budget,
            eos_token_ids=tuple(eos_ids(config)),
            criteria=tuple(criteria),
            deadline=float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        )
        generators = row_generators(len(rows), generator, prompts.device) if config.do_sample else None
        callbacks = [] if callback is None else [callback]
        streaming = None if streamer is None else Streaming(streamer, prompts, self.config.mask_token_id)
        callbacks += [] if streamer is None else [streaming]
        tell = (lambda *step: [call(*step) for call in callbacks]) if callbacks else None
        write = self._speculate if config.decoding == "self_speculative" else self._denoise_blocks
        try:
            answers = write(rows, config, ends, generators, list(logits_processor or []), tell, prefix)
        except BaseException:
            if streaming is not None:
                streaming.abort()
            raise
        if streaming is not None:
            streaming.end(answers[0])
        return self._output(prompts, answers, config)

    def _merged(self, given: GenerationConfig | None, kwargs: dict) -> tuple[GenerationConfig, dict, dict]:
        """The config to decode by; what of it this call asks for, beyond the model's own; and unknown arguments."""
        is_config = given is None or isinstance(given, GenerationConfig)
        require(is_config, "generation_config", type(given).__name__, "a GenerationConfig")
        for source in (self.generation_config, given, SimpleNamespace(**kwargs)):
            validate_block_fields(source)  # before they are merged, which trips over values of the wrong kind
        config, unknown = self._prepare_generation_config(given, **kwargs)
        defaults = CloverGenerationConfig._get_default_generation_params()
        config.update(**defaults, defaults_only=True, allow_custom_entries=True)  # for arguments that are None
        own, asked = self.generation_config.to_dict(), {} if given is None else given.to_dict()
        asked = {name: value for name, value in asked.items() if value != own.get(name)}
        limit_by([kwargs, asked], config)
        asked = {name: value for name, value in (asked | kwargs).items() if value is not None}
        if config.temperature == 0:
            config.do_sample, config.temperature = False, 1.0
        if config.eos_token_id == []:
            config.eos_token_id = None
        return config, asked, unknown

    def _denoise_blocks(self, rows, config, ends: Ends, generators, user: list, callback, prefix) -> list[Answer]:
        mask_token_id, limit = self.config.mask_token_id, config.max_thinking_tokens
        choose = LowConfidence(config.threshold, mask_token_id)
        if generators is not None:
            temperature = 1.0 if config.temperature is None else config.temperature
            choose = LowConfidence(config.threshold, mask_token_id, temperature, filters_of(config), generators)
        thinking = {} if limit is None else {"prepare": close_thinking(marks_of(config), limit)}
        if limit is not None:
            thinking["first"] = config.think_start_token_id  # where thinking begins decides what else can stand
        return block_diffusion(
            self,
            rows,
            choose,
            block_size=self.config.block_size if config.block_size is None else config.block_size,
            ends=ends,
            max_denoising_steps=config.max_denoising_steps,
            callback=callback,
            processors=tuple(processors_of(config, list(ends.eos_token_ids), user, mask_token_id)),
            rules_of=rules_of(config),
            prefix=prefix,
            keep_prefixes=bool(config.return_dict_in_generate),
            expert_coreset_top_p=config.expert_coreset_top_p,
            **thinking,
        )

    def _fitting(self, name: str, given: object, rows: list[torch.Tensor], config: GenerationConfig) -> Prefix:
        """The prefix to go on from, if it is one of an earlier answer and the prompt begins with it."""
        blocks = config.decoding == "low_confidence"
        require(blocks, name, "given", f"unset with `decoding={config.decoding!r}`")
        prefixes = given if isinstance(given, list) else [given]
        single = len(prefixes) == len(rows) == 1
        require(single, name, f"given for {len(rows)} answers", "the prefix of one, used with one prompt")
        ours = all(isinstance(getattr(prefixes[0], part, None), torch.Tensor) for part in ("ids", "mask"))
        require(ours, name, type(prefixes[0]).__name__, "what an earlier generate() returned under this name")
        known, prompt = prefixes[0].ids[prefixes[0].mask.bool()].tolist(), rows[0].tolist()
        block_size = self.config.block_size if config.block_size is None else config.block_size
        owner = getattr(prefixes[0], "owner", None)
        require(owner is None or owner() is self, name, "of another model", "what this model returned")
        fits = known == prompt[: len(known)] and len(known) % block_size == 0
        require(fits, name, f"of {len(known)} tokens", "of whole blocks of tokens that the prompt begins with")
        return prefixes[0]

    def _speculate(self, rows, config, ends: Ends, generators, user: list, callback, prefix: None) -> list[Answer]:
        from .speculative_clover import self_speculative  # which builds on this file

        processes = [
            self._get_logits_processor(
                config, len(row), device=row.device, logits_processor=LogitsProcessorList(user), model_kwargs={}
            )
            for row in rows
        ]
        return self_speculative(
            self,
            rows,
            LowConfidence(config.draft_threshold, self.config.mask_token_id),
            block_size=self.config.block_size if config.block_size is None else config.block_size,
            ends=ends,
            draft_steps=config.draft_steps,
            processes=processes,
            generators=generators,
            callback=callback,
            expert_coreset_top_p=config.expert_coreset_top_p,
        )

    def _autoregressive(self, prompts, attention_mask, config: GenerationConfig, arguments: dict):
        """transformers' own generation over the causal pass; an answer may fill the context here too."""
        embeds = arguments.get("inputs_embeds")
        for name in ("past_key_values", "cache"):
            ours = isinstance(arguments.get(name), list) or hasattr(arguments.get(name), "ids")
            require(not ours, name, "of block diffusion", "a transformers Cache with `decoding='autoregressive'`")
        if prompts is None and isinstance(embeds, torch.Tensor) and embeds.ndim == 3:
            columns = longest = embeds.shape[1]
        else:
            longest = max(len(row) for row in self._prompt_rows(prompts, attention_mask, config))
            columns = prompts.shape[1] + (embeds.shape[1] if isinstance(embeds, torch.Tensor) else 0)
        fields = {name: value for name, value in config.to_dict().items() if name not in BLOCK_FIELDS}
        fields |= {"max_new_tokens": self._budget(config, columns, longest), "max_length": None}
        return super().generate(
            prompts, generation_config=GenerationConfig(**fields), attention_mask=attention_mask, **arguments
        )

    def _check_that_it_can_denoise(self) -> None:
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

    def _prompt_rows(self, prompts, attention_mask, config: GenerationConfig) -> list[torch.Tensor]:
        """The prompts without their padding, after all that can be wrong with them."""
        is_mask = attention_mask is None or isinstance(attention_mask, torch.Tensor)
        require(is_mask, "attention_mask", type(attention_mask).__name__, "a tensor")
        is_batch = isinstance(prompts, torch.Tensor) and prompts.ndim == 2 and len(prompts) > 0
        require(is_batch, "input_ids", _kind(prompts), "a (B, P) tensor of at least one row")
        integral = not prompts.is_floating_point() and prompts.dtype != torch.bool
        require(integral, "input_ids", str(prompts.dtype), "integer token ids")
        self._prepare_special_tokens(config, attention_mask is not None, device=prompts.device)
        if attention_mask is None:
            attention_mask = self._prepare_attention_mask_for_generation(prompts, config, {})
        return self._real_tokens(prompts, attention_mask)

    def _output(
        self, prompts: torch.Tensor, answers: list[Answer], config: GenerationConfig
    ) -> torch.Tensor | CloverGenerateOutput:
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
            mean_accepted_length=[len(answer.tokens) / answer.num_commit_passes for answer in answers]
            if config.decoding == "self_speculative"
            else None,
            trace=[answer.trace for answer in answers] if config.output_trace else None,
            **({CACHE: [answer.prefix for answer in answers]} if config.decoding == "low_confidence" else {}),
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
        require(longest < context, "input_ids", f"{longest} tokens", f"shorter than the context of {context}")
        budget = config.max_new_tokens
        if budget is None and config.max_length is not None:
            budget = config.max_length - columns
            require(budget >= 1, "max_length", config.max_length, f"more than the prompt's {columns} columns")
        if budget is None:
            budget = context - longest
        by_length = config.max_new_tokens is None
        name, asked, most = ("max_length", columns + budget, columns) if by_length else ("max_new_tokens", budget, 0)
        shared = f"prompt ({longest}) and answer share a context of {context} tokens"
        require(longest + budget <= context, name, asked, f"at most {most + context - longest}: {shared}")
        least = config.min_new_tokens or 0
        require(least <= budget, "min_new_tokens", least, f"at most {budget}, the tokens that may be written")
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
