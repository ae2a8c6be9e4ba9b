# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""What `generate()` can be asked for: the fields of its configuration, and errors for everything it would not use.

Nothing is silently ignored: a value out of range, an unknown or misspelt name, a field that the chosen decoding has no
use for, and fields that contradict each other are each a `ValueError`, before any work.
"""

import copy
import difflib
from collections.abc import Callable
from itertools import chain

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .configuration_clover import require

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
    "draft_threshold": 0.5,
    "draft_steps": 2,
}
DECODINGS = {  # with the fields above that each has no use for
    "low_confidence": {"draft_threshold", "draft_steps"},
    "self_speculative": set(BLOCK_FIELDS)
    - {"draft_threshold", "draft_steps", "block_size", "expert_coreset_top_p", "output_trace"},
    "autoregressive": set(BLOCK_FIELDS),
}
SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p"}


class CloverGenerationConfig(GenerationConfig):
    r"""
    How to decode. Precedence: arguments of `generate()`, then a `generation_config` passed to it, then the model's,
    then the defaults here.

    Args:
        decoding (`str`, defaults to "low_confidence"): by blocks; or "autoregressive": transformers' own generation
            over the causal pass, with all of its options and none of the ones here.
            Or "self_speculative": the same text in fewer passes, drafted by denoising and verified causally; for
            greedy and sampled text with transformers' own processors.
        draft_threshold (`float`, defaults to 0.5), draft_steps (`int`, defaults to 2): of "self_speculative": how a
            draft of `block_size` tokens, the last known one included, is filled.
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
        max_thinking_tokens (`int`, *optional*): closes the thinking part after so many tokens, and lets an answer
            have one such part; 0 leaves it empty. What lies behind is not filled in before the part is closed; tokens
            that were there before the part was opened stay.
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
        config = self
        if self.temperature == 0:  # greedy; transformers would ask for sampling, or for another value
            config = copy.copy(self)
            config.temperature = None
        GenerationConfig.validate(config, *args, **kwargs)


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
    check("decoding", str, '"' + '", "'.join(DECODINGS) + '"', lambda value: value in DECODINGS)
    check("draft_threshold", number, "a number in [0, 1]", lambda value: 0 <= value <= 1)
    check("draft_steps", int, "an integer of at least 1", lambda value: value >= 1)
    check("expert_coreset_top_p", number, "null or a number in (0, 1]", lambda value: 0 < value <= 1)
    for name in ("output_trace", "return_dict_in_generate", "do_sample"):
        check(name, bool, "true or false")
    for name in ("max_new_tokens", "max_length", "num_return_sequences"):
        check(name, int, "an integer of at least 1", lambda value: value >= 1)
    for name in ("max_thinking_tokens", "no_repeat_ngram_size", "top_k", "min_new_tokens"):
        check(name, int, "an integer of at least 0", lambda value: value >= 0)
    for name in ("presence_penalty", "frequency_penalty"):
        check(name, number, "a finite number, at most 1e6 either way", lambda value: abs(value) <= 1e6)
    check("repetition_penalty", number, "a number above 0, in [1e-6, 1e6]", lambda value: 1e-6 <= value <= 1e6)
    check("max_time", number, "a number above 0", lambda value: 0 < value < float("inf"))
    check("temperature", number, "0 or a number of at least 1e-6", lambda v: v == 0 or 1e-6 <= v < float("inf"))
    check("top_p", number, "a number in (0, 1]", lambda value: 0 < value <= 1)
    check("min_p", number, "a number in [0, 1]", lambda value: 0 <= value <= 1)
    for name in ("stop_ramp", "think_end_ramp"):
        check(name, dict, '{"start", "slope", "max"}, three numbers in [0, 1e9]', _is_ramp)
    for name in ("pad_token_id", "think_start_token_id", "think_end_token_id"):
        check(name, int, "a token id", lambda value: value >= 0)
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
    numbers = all(type(number) in (int, float) and 0 <= number <= 1e9 for number in value.values())
    return numbers and set(value) == {"start", "slope", "max"}


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


def limit_by(sources: list[dict], config: GenerationConfig) -> None:
    """Lets the first source that says how long an answer may be have its way, and refuses one that says it twice."""
    for source in sources:
        length, new = source.get("max_length"), source.get("max_new_tokens")
        both = length is not None and new is not None
        require(not both, "max_length", length, f"unset where `max_new_tokens` is given ({new}): they are one limit")
        if length is not None or new is not None:
            config.max_length, config.max_new_tokens = length, new
            return


def refuse_contradictions(config: GenerationConfig, asked: dict, arguments: dict) -> None:
    """Raises a `ValueError` for options that are allowed, but not together.

    `asked` is what this call says, by `arguments` or a generation config: what a model's own config says about other
    decodings does no harm. Nor does what any config says about sampling, as in transformers, whose pipelines fill in a
    temperature.
    """
    for name in sorted((DECODINGS[config.decoding] - {"decoding"}) & set(asked)):
        neutral = name in MARKS or asked[name] == BLOCK_FIELDS[name]
        require(neutral, name, asked[name], f"unset with `decoding={config.decoding!r}`")
    if config.decoding == "autoregressive":
        return  # transformers has its own rules
    greedy = not config.do_sample
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
    ends = config.eos_token_id is not None or "stop_ramp" not in asked
    require(ends, "stop_ramp", asked.get("stop_ramp"), "unset where there is no `eos_token_id`")
    sequences = config.no_repeat_ngram_size or any(len(word) > 1 for word in config.bad_words_ids or [])
    steps = config.max_denoising_steps
    further = sequences or config.max_thinking_tokens is not None
    require(
        not (further and steps and config.decoding == "low_confidence"),
        "max_denoising_steps",
        steps,
        "unset with `no_repeat_ngram_size`, bad words of several tokens or `max_thinking_tokens`: what they forbid "
        "takes further passes",
    )
    for name in ("think_end_ramp", "max_thinking_tokens"):
        marks = (config.think_start_token_id, config.think_end_token_id)
        known = getattr(config, name) is None or None not in marks
        require(known, name, getattr(config, name), "unset where `think_start_token_id` or `think_end_token_id` is")
    if config.max_thinking_tokens is not None:
        end = config.think_end_token_id
        banned = end in {*(config.suppress_tokens or []), *chain(*(config.bad_words_ids or []))}
        limit = config.max_thinking_tokens
        require(not banned, "max_thinking_tokens", limit, f"unset where the end of thinking, {end}, is forbidden")
        late = config.min_new_tokens and end in eos_ids(config)
        require(not late, "max_thinking_tokens", limit, "unset with `min_new_tokens` where thinking ends the answer")


MARKS = ("think_start_token_id", "think_end_token_id")


def eos_ids(config: GenerationConfig) -> list[int]:
    """The end tokens, however they are given."""
    ids = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def check_token_ids(config: GenerationConfig, vocab_size: int, mask_token_id: int | None) -> None:
    """Raises a `ValueError` for a token that a model does not have, or that cannot play the part it is given."""
    words, suppressed = config.bad_words_ids or [], config.suppress_tokens or []
    named = {name: [] if (token := getattr(config, name, None)) is None else [token] for name in MARKS}
    named["pad_token_id"] = [] if config.pad_token_id is None else [config.pad_token_id]
    named |= {"eos_token_id": eos_ids(config), "suppress_tokens": suppressed, "bad_words_ids": chain(*words)}
    for name, tokens in named.items():
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        require(not outside, name, outside[:1], f"of tokens in [0, {vocab_size}), the model's vocabulary")
    for name in ("eos_token_id", *MARKS):
        written = mask_token_id not in named[name]
        require(written, name, getattr(config, name), f"not the mask token ({mask_token_id}), which is never written")
    start, end = named[MARKS[0]], named[MARKS[1]]
    require(not start or start != end, MARKS[1], end, f"other than `{MARKS[0]}`: one mark cannot open and close")
    left = set(range(vocab_size)) - set(suppressed) - {word[0] for word in words if len(word) == 1} - {mask_token_id}
    name = "suppress_tokens" if suppressed else "bad_words_ids"
    require(bool(left), name, f"all of {vocab_size} tokens", "fewer than the vocabulary: something has to be written")
    ends = [word for word in words if len(word) == 1 and word[0] in named["eos_token_id"]]
    allowed = "of other words than an end token, which transformers drops in silence; `suppress_tokens` bans one"
    require(not ends or config.decoding == "autoregressive", "bad_words_ids", ends, allowed)


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
    require(generator is None or config.do_sample, "generator", "given", "unset unless `do_sample=True`")
    if config.decoding == "autoregressive":
        require(callback is None, "callback", callback, "unset with `decoding='autoregressive'`: it has no steps")
        none = "unset with `decoding='autoregressive'`: transformers takes none"
        require(generator is None, "generator", "given", none)
    needed = config.stop_strings is None or tokenizer is not None
    require(needed, "stop_strings", config.stop_strings, "used with `tokenizer=`, the model's tokenizer")
    known = tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)
    require(known, "tokenizer", type(tokenizer).__name__, "a transformers tokenizer")
