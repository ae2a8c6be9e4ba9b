"""Trains the small checkpoint's tokenizer on generated conversations and saves it with its chat template.

Run as `python -m clover.training.tokenizer --out checkpoints/clover-tiny`.
"""

import argparse
import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from clover.training.corpus import ANSWER_HEADER, documents, render

VOCAB_SIZE = 1152
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
# Not special, so that decoding with skip_special_tokens keeps them: they belong to the answer's text.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# Words without the space before them, so that a word is one token wherever it stands: a small model has to copy words
# from a request into quotes, and with Qwen2's pattern `" Mona"` and `"Mona"` would be strangers to each other. Single
# digits, as in Qwen2; runs of punctuation take the spaces after them.
SPLIT_PATTERN = r"[\p{L}_]+|\p{N}|\s*[\r\n]+|(?:[^\s\p{L}\p{N}_]+ ?)+|\s+"

CHAT_TEMPLATE = r"""
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type != 'text' %}{{- raise_exception('This model reads text parts alone.') }}{%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- elif content is not none and content is defined %}
        {{- raise_exception('A message has a content that is neither text nor a list of text parts.') }}
    {%- endif %}
{%- endmacro %}
{%- set first_system = messages and messages[0].role == 'system' %}
{%- if first_system or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if first_system %}
        {{- text(messages[0].content) }}
        {%- if tools %}{{- '\n\n' }}{%- endif %}
    {%- endif %}
    {%- if tools %}
        {{- 'Tools:' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function else tool %}
            {%- set parameters = (function.parameters or {}).properties or {} %}
            {{- '\n' + function.name + '(' + parameters | join(', ') + ')' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.role == 'assistant' and message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- text(message.content) }}
        {%- if message.role == 'assistant' %}
            {%- for call in message.tool_calls or [] %}
                {%- set call = call.function if call.function else call %}
                {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
                {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
                {{- call.arguments if call.arguments is string else call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".lstrip()

# How transformers' `parse_response` takes an answer apart: thinking, tool calls (JSON), and the rest.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANSWER_HEADER,
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        # White space before the end mark belongs to no part: it would open an empty content after a tool call.
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}

CONFIG = {
    "tokenizer_class": "TokenizersBackend",
    "model_max_length": 1024,
    "padding_side": "left",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "mask_token": "<|mask|>",
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "response_template": RESPONSE_TEMPLATE,
}


def _empty_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, the markup tokens last."""
    markup = CONTROL_TOKENS + MARKUP_TOKENS
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(markup),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _empty_tokenizer()
    # Training does not know the markup tokens yet: cut there, so that no merge is learned across them.
    cut = re.compile("|".join(map(re.escape, markup)))
    tokenizer.train_from_iterator((piece for text in texts for piece in cut.split(text)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Train and save as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = (render(document) for document in islice(documents(options.seed), options.conversations))
    tokenizer = train(texts)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"only {tokenizer.get_vocab_size()} tokens: the corpus has too few different words")
    save(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {options.out}")


if __name__ == "__main__":
    main()
