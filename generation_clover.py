# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""How a Clover writes: block after block, each filled where the model is sure.

For a block of `block_size` positions on a grid anchored at a row's first real token:

1. mask it; where the prompt ends inside it, the prompt's tail stays clean.
2. repeat until nothing that can still be shown is masked:
   a. a denoising pass over the block gives logits for its masked positions;
   b. `LowConfidence` chooses a token for each, and accepts those with confidence above `threshold`, or else the one
      most confident position;
   c. accepted tokens are filled in, and never change again.
3. stop at an end token or at the budget; otherwise commit the block with a causal pass and go on to the next.

This is SGLang's `LowConfidence` algorithm (0.5.23), token by token, but for one thing: the mask token is never
chosen. (SGLang emits it, or never ends.) Its probability stays in the normalisation, so confidences are the same.

The loop, `block_diffusion`, knows no model: it calls `prefill`, `denoise` and `commit` of whatever it is given.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

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

    The token is the most probable one, the mask token excepted; its confidence is its probability, in fp32, with the
    mask token's share left in the normalisation. Accepted are masked positions of confidence strictly above
    `threshold`; a row that has none accepts its most confident one. Ties go to the first token, the first position.
    """

    threshold: float
    mask_token_id: int

    def __call__(self, logits: torch.Tensor, masked: torch.Tensor) -> Choice:
        """Chooses tokens for a batch of blocks.

        Args:
            logits: (N, V) of the N masked positions, in the order of `masked.nonzero()`.
            masked: (B, T) bool, with N True.
        """
        scores = logits.float()
        normaliser = scores.logsumexp(-1)
        mask_column = torch.tensor([self.mask_token_id], device=scores.device)
        best, chosen = scores.index_fill(-1, mask_column, float("-inf")).max(-1)
        tokens = torch.zeros(masked.shape, dtype=torch.long, device=masked.device).masked_scatter(masked, chosen)
        confidences = torch.full(masked.shape, float("-inf"), device=masked.device)
        confidences = confidences.masked_scatter(masked, (best - normaliser).exp())
        accepted = confidences > self.threshold
        fallback = torch.zeros_like(accepted).scatter_(1, confidences.argmax(-1, keepdim=True), True)
        accepted = torch.where(accepted.any(-1, keepdim=True), accepted, fallback & masked)
        return Choice(tokens, accepted, confidences)


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


@dataclass(frozen=True)
class DenoisingStep:
    """What one denoising pass filled in one row: positions count from the row's first real token."""

    block: int
    step: int
    positions: list[int]
    tokens: list[int]
    confidences: list[float]


@dataclass
class Answer:
    """One row's new tokens, its end token included, and what they took."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"  # or "stop": an end token
    num_denoising_passes: int = 0
    num_commit_passes: int = 0
    trace: list[DenoisingStep] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """TPF: tokens kept over denoising and commit passes; the prefill is not counted."""
        return len(self.tokens) / (self.num_denoising_passes + self.num_commit_passes)


StepCallback = Callable[[int, DenoisingStep, list[int]], None]


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows of unequal lengths as one (B, P) tensor padded on the left, and its mask (B, P)."""
    width = max(len(row) for row in rows)
    ids, mask = rows[0].new_zeros(len(rows), width), rows[0].new_zeros(len(rows), width)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids, mask


def shown_end(
    block: torch.Tensor, masked: torch.Tensor, first: torch.Tensor, budget: torch.Tensor, eos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in each block (B, T) the answer must stop, by what is known so far.

    Args:
        first: (B,) where the answer starts in the block. budget: (B,) tokens that may still be written. eos: (E,).
    Returns:
        end: (B,) just after the first accepted end token, or where the budget ends, or T.
        stopped: (B,) bool, whether it is an end token.
    """
    width = block.shape[1]
    positions = torch.arange(width, device=block.device)
    ends_here = torch.isin(block, eos) & ~masked & (positions >= first[:, None])
    after_eos = torch.where(ends_here, positions + 1, width + 1).amin(-1)
    end = torch.minimum(after_eos, (first + budget).clamp(max=width))
    return end, end == after_eos


def block_diffusion(
    model: BlockModel,
    prompts: list[torch.Tensor],
    choose: LowConfidence,
    block_size: int,
    max_new_tokens: int,
    eos_token_ids: list[int],
    max_denoising_steps: int | None = None,
    callback: StepCallback | None = None,
    record_trace: bool = False,
    **denoise_options,
) -> list[Answer]:
    """Writes an answer to each prompt. The rows share passes and nothing else.

    A row whose block is resolved waits, out of the batch, until the others' are; a row that has its whole answer
    leaves for good. Only whole blocks are committed, and the last one of an answer is not.

    Args:
        prompts: 1-D token ids, one or more each. eos_token_ids: tokens that end an answer; may be empty.
        max_new_tokens: the budget of each row. max_denoising_steps: after so many passes over a block, all that is
            still masked is accepted; None: no limit (a block takes at most `block_size`).
        callback: called after each step with the row, the step and the block's tokens, masks included.
        denoise_options: further arguments of `model.denoise`.
    """
    device = prompts[0].device
    answers = [Answer() for _ in prompts]
    eos = torch.tensor(eos_token_ids, dtype=torch.long, device=device)
    grid = [len(prompt) // block_size * block_size for prompt in prompts]  # where each row's first block starts
    prefix = model.prefill(*left_padded([prompt[:start] for prompt, start in zip(prompts, grid, strict=True)]))
    rows = torch.arange(len(prompts), device=device)  # of the prompts; those still being written
    start = torch.tensor(grid, device=device)
    first = torch.tensor([len(prompt) for prompt in prompts], device=device) - start  # the answer's, in the block
    block = torch.full((len(prompts), block_size), choose.mask_token_id, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        block[i, : first[i]] = prompt[grid[i] :]
    budget = torch.full_like(start, max_new_tokens)
    positions = torch.arange(block_size, device=device)
    while len(rows):
        masked = positions >= first[:, None]
        active, active_prefix, step = torch.arange(len(rows), device=device), prefix, 0
        while len(active):
            logits = model.denoise(active_prefix, block[active], masked[active], **denoise_options)
            choice = choose(logits, masked[active])
            accepted = masked[active] if step + 1 == max_denoising_steps else choice.accepted
            block[active] = torch.where(accepted, choice.tokens, block[active])
            masked[active] = masked[active] & ~accepted
            for i in rows[active].tolist():
                answers[i].num_denoising_passes += 1
            if record_trace or callback is not None:
                _report(answers, rows[active], start[active], step, choice, accepted, block[active], callback)
            end, _ = shown_end(block[active], masked[active], first[active], budget[active], eos)
            pending = (masked[active] & (positions < end[:, None])).any(-1)
            if not pending.all():
                active = active[pending]
                active_prefix = prefix.select(active) if len(active) else prefix
            step += 1
        end, stopped = shown_end(block, masked, first, budget, eos)
        budget = budget - (end - first)
        for i, tokens, a, b, stop in zip(
            rows.tolist(), block.tolist(), first.tolist(), end.tolist(), stopped.tolist(), strict=True
        ):
            answers[i].tokens += tokens[a:b]
            answers[i].finish_reason = "stop" if stop else "length"
        going_on = (~stopped & (budget > 0)).nonzero().flatten()
        if len(going_on):
            kept = prefix if len(going_on) == len(rows) else prefix.select(going_on)
            prefix = model.commit(kept, block[going_on])
            for i in rows[going_on].tolist():
                answers[i].num_commit_passes += 1
        rows, start, budget = rows[going_on], start[going_on] + block_size, budget[going_on]
        first, block = torch.zeros_like(rows), torch.full_like(block[going_on], choose.mask_token_id)
    return answers


def _report(
    answers: list[Answer],
    rows: torch.Tensor,
    starts: torch.Tensor,
    step: int,
    choice: Choice,
    accepted: torch.Tensor,
    blocks: torch.Tensor,
    callback: StepCallback | None,
) -> None:
    """Adds a step to the traces of its rows, and tells the callback."""
    for row, start, tokens, confidences, chosen in zip(
        rows.tolist(), starts.tolist(), blocks.tolist(), choice.confidences.tolist(), accepted, strict=True
    ):
        filled = chosen.nonzero().flatten().tolist()
        record = DenoisingStep(
            block=start // len(tokens),
            step=step,
            positions=[start + i for i in filled],
            tokens=[tokens[i] for i in filled],
            confidences=[confidences[i] for i in filled],
        )
        answers[row].trace.append(record)
        if callback is not None:
            callback(row, record, tokens)


# ---- generate() ------------------------------------------------------------------------------------------------------


class CloverGenerationConfig(GenerationConfig):
    r"""
    How to decode. Precedence: arguments of `generate()`, then a `generation_config` passed to it, then the model's,
    then the defaults here.

    Args:
        block_size (`int`, defaults to the model's): positions denoised together, at least 1.
        threshold (`float`, defaults to 0.95): confidence above which a token is accepted, in [0, 1]. At 1.0 every
            pass accepts one token.
        max_denoising_steps (`int`, *optional*): passes over a block after which all that is masked is accepted.
        decoding (`str`, defaults to "low_confidence"): the only decoding so far.
        expert_coreset_top_p (`float`, *optional*): overrides the model's; see `CloverConfig`.
        output_trace (`bool`, defaults to False): return what each denoising pass filled.
        max_new_tokens, max_length: the budget; unset, an answer may fill the context.
        eos_token_id (`int` or list), pad_token_id, return_dict_in_generate: as in transformers.

    Raises:
        ValueError: a value is not allowed, or a field of transformers is set that block diffusion does not use.
    """

    def __init__(self, **kwargs):
        self.block_size = kwargs.pop("block_size", None)
        self.threshold = kwargs.pop("threshold", None)
        self.max_denoising_steps = kwargs.pop("max_denoising_steps", None)
        self.decoding = kwargs.pop("decoding", None)
        self.expert_coreset_top_p = kwargs.pop("expert_coreset_top_p", None)
        self.output_trace = kwargs.pop("output_trace", None)
        super().__init__(**kwargs)

    @staticmethod
    def _get_default_generation_params() -> dict:
        defaults = GenerationConfig._get_default_generation_params()
        del defaults["max_length"]  # transformers' 20 tokens are less than a block
        return defaults | {"threshold": 0.95, "decoding": "low_confidence", "output_trace": False}

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

    def check(name: str, kind: type | tuple[type, ...], allowed: str, test: Callable[[object], bool]) -> None:
        value = getattr(config, name, None)
        well_typed = isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
        require(value is None or (well_typed and test(value)), name, value, allowed)

    check("block_size", int, "an integer of at least 1", lambda value: value >= 1)
    check("threshold", (int, float), "a number in [0, 1]", lambda value: 0 <= value <= 1)
    check("max_denoising_steps", int, "null or an integer of at least 1", lambda value: value >= 1)
    check("decoding", str, '"low_confidence"', lambda value: value == "low_confidence")
    check("expert_coreset_top_p", (int, float), "null or a number in (0, 1]", lambda value: 0 < value <= 1)
    check("output_trace", bool, "true or false", lambda value: True)
    check("return_dict_in_generate", bool, "true or false", lambda value: True)
    check("max_new_tokens", int, "an integer of at least 1", lambda value: value >= 1)
    check("max_length", int, "an integer of at least 1", lambda value: value >= 1)
    check("pad_token_id", int, "a token id", lambda value: True)
    ids = getattr(config, "eos_token_id", None)
    listed = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    well_typed = all(isinstance(token, int) and not isinstance(token, bool) for token in listed)
    require(well_typed, "eos_token_id", ids, "a token id or a list of them")


USED_FIELDS = {"block_size", "threshold", "max_denoising_steps", "decoding", "expert_coreset_top_p", "output_trace"}
USED_FIELDS |= {"max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "return_dict_in_generate"}
ANY_VALUE = {"bos_token_id", "transformers_version", "_from_model_config"}  # describe a model, ask for nothing
UNLIMITED = "an answer may fill the context"


def refuse_unused(config: GenerationConfig, arguments: dict) -> None:
    """Nothing is silently ignored: raises a `ValueError` for what block diffusion has no use for."""
    neutral = GenerationConfig._get_default_generation_params()
    names = sorted(USED_FIELDS | {"inputs", "attention_mask", "generation_config", "callback"})
    for name, value in arguments.items():
        if value is not None:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(names)}."
            raise ValueError(f"`{name}` is not an argument of block-diffusion generate(): {hint}")
    for name, value in config.to_dict().items():
        if name in USED_FIELDS or name in ANY_VALUE or value is None or value == neutral.get(name):
            continue
        greedy = name == "temperature" and value == 0
        off = value is False and neutral.get(name) is None
        require(greedy or off, name, value, f"unset ({neutral.get(name)}): block-diffusion generate() does not use it")


@dataclass
class CloverGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(return_dict_in_generate=True)` returns.

    Args:
        sequences (B, P + new): prompts and answers, padded on the right after an answer's end.
        finish_reason: per row "stop" (an end token) or "length" (the budget).
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
        callback: StepCallback | None = None,
        **kwargs,
    ) -> torch.Tensor | CloverGenerateOutput:
        """Answers prompts by block diffusion, greedily.

        Args:
            inputs, or `input_ids` (B, P): prompts of at least one token, padded on the left.
            attention_mask (B, P): 0 on padding; by default inferred from the pad token, as in transformers.
            generation_config: see `CloverGenerationConfig`; its fields may be given as arguments too.
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
        require(callback is None or callable(callback), "callback", callback, "a function of row, step and block")
        is_mask = attention_mask is None or isinstance(attention_mask, torch.Tensor)
        require(is_mask, "attention_mask", type(attention_mask).__name__, "a tensor")
        # There transformers turns caches off. (Its own property for this warns in newer versions.)
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in self.modules())
        caches = not (self.training and checkpointing)
        require(caches, "model.training", True, "false with gradient checkpointing: call `model.eval()` first")
        for source in (self.generation_config, generation_config, SimpleNamespace(**kwargs)):
            validate_block_fields(source)  # before they are merged, which trips over values of the wrong kind
        config, arguments = self._prepare_generation_config(generation_config, **kwargs)
        refuse_unused(config, arguments)
        mask_token_id = self.config.mask_token_id
        require(
            mask_token_id is not None,
            "mask_token_id",
            mask_token_id,
            "set to denoise: `model.config.mask_token_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)`. The 35B "
            "release's mask token is not publicly known, so its config.json leaves it unset",
        )
        is_batch = isinstance(prompts, torch.Tensor) and prompts.ndim == 2 and len(prompts) > 0
        require(is_batch, "input_ids", _kind(prompts), "a (B, P) tensor of at least one row")
        integral = not prompts.is_floating_point() and prompts.dtype != torch.bool
        require(integral, "input_ids", str(prompts.dtype), "integer token ids")
        self._prepare_special_tokens(config, attention_mask is not None, device=prompts.device)
        if attention_mask is None:
            attention_mask = self._prepare_attention_mask_for_generation(prompts, config, {})
        rows = self._real_tokens(prompts, attention_mask)
        budget = self._budget(config, prompts.shape[1], max(len(row) for row in rows))
        eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        want_dict = bool(config.return_dict_in_generate)
        require(want_dict or not config.output_trace, "output_trace", True, "used with `return_dict_in_generate=True`")
        answers = block_diffusion(
            self,
            rows,
            choose=LowConfidence(config.threshold, mask_token_id),
            block_size=self.config.block_size if config.block_size is None else config.block_size,
            max_new_tokens=budget,
            eos_token_ids=eos,
            max_denoising_steps=config.max_denoising_steps,
            callback=callback,
            record_trace=bool(config.output_trace),
            expert_coreset_top_p=config.expert_coreset_top_p,
        )
        pad = 0 if config._pad_token_tensor is None else config._pad_token_tensor.item()
        width = max(len(answer.tokens) for answer in answers)
        written = [answer.tokens + [pad] * (width - len(answer.tokens)) for answer in answers]
        sequences = torch.cat([prompts, torch.tensor(written, dtype=prompts.dtype, device=prompts.device)], dim=1)
        if not want_dict:
            return sequences
        return CloverGenerateOutput(
            sequences=sequences,
            finish_reason=[answer.finish_reason for answer in answers],
            num_denoising_passes=[answer.num_denoising_passes for answer in answers],
            num_commit_passes=[answer.num_commit_passes for answer in answers],
            tokens_per_forward=[answer.tokens_per_forward for answer in answers],
            trace=[answer.trace for answer in answers] if config.output_trace else None,
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
    "CloverGenerateOutput",
    "CloverGenerationConfig",
    "CloverGenerationMixin",
    "DenoisingStep",
    "LowConfidence",
    "block_diffusion",
]
