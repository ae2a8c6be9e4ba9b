"""A chat in the terminal: text as it settles, and behind it the draft of the block in progress.

    python examples/chat.py
    python examples/chat.py --threshold 0.8 --system "Be brief."
    printf 'Convert 12 kg to g.\nWhat is 482 + 377?\n' | python examples/chat.py     # no drafts where nobody looks

`/reset` forgets the conversation, `/quit` or the end of input leaves. Each turn goes on from the cache of the one
before it, if the conversation still begins with the very tokens that cache is of.
"""

import argparse
import shutil
import sys
import unicodedata
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BatchEncoding, TextStreamer

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
SAVE, RESTORE, DIM, PLAIN = "\0337", "\0338\033[K", "\033[2m", "\033[0m"


def width(character: str) -> int:
    """Columns that a character takes on a terminal."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """As much of the beginning of a text as has room in so many columns."""
    for i, character in enumerate(text):
        columns -= width(character)
        if columns < 0:
            return text[:i]
    return text


class DraftStreamer(TextStreamer):
    """Prints settled text; on a terminal also the rest of the block, dimmed, until something takes its place.

    A draft stays on its line: what wraps or scrolls could not be erased by going back to where it began.
    """

    def __init__(self, tokenizer, mask_token_id: int, drafts: bool):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.mask_token_id, self.drafts, self.drafted, self.column = mask_token_id, drafts, False, 0

    def put_draft(self, value: torch.Tensor) -> None:
        if not self.drafts:
            return
        self._erase()
        # The parent keeps the last word back until it is whole.
        held = self.tokenizer.decode(self.token_cache, skip_special_tokens=True)[self.print_len :]
        pieces = ["·" if token == self.mask_token_id else self.tokenizer.decode([token]) for token in value.tolist()]
        draft = (held + "".join(pieces)).replace("\n", "⏎")
        draft = cut(draft, shutil.get_terminal_size().columns - 1 - self.column)
        print(SAVE + DIM + draft + PLAIN, end="", flush=True)
        self.drafted = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._erase()
        super().on_finalized_text(text, stream_end)
        columns = shutil.get_terminal_size().columns
        for character in text:
            wide = width(character)
            begins = character == "\n" or self.column + wide > columns  # a line of its own, or the rest of a long one
            self.column = (0 if begins else self.column) + (0 if character == "\n" else wide)

    def _erase(self) -> None:
        if self.drafted:
            print(RESTORE, end="", flush=True)
            self.drafted = False


def prompt_of(tokenizer, messages: list[dict]) -> BatchEncoding:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def fitting(caches: list | None, prompt: torch.Tensor) -> list | None:
    """The caches of the last answer, if the new prompt begins with the tokens that they are of."""
    if caches is None:
        return None
    known = caches[0].ids[0]
    return caches if torch.equal(known, prompt[0, : len(known)]) else None


def answer(model, tokenizer, prompt: BatchEncoding, caches: list | None, **options) -> tuple[str, list, object]:
    """The answer to a prompt, the caches to go on from, and generate()'s whole output.

    The text is without its end token only: marks of thinking and of tool calls belong to the conversation, which would
    otherwise begin with other tokens than the cache.
    """
    ids = prompt["input_ids"]
    caches = fitting(caches, ids)
    out = model.generate(**prompt, past_key_values=caches, return_dict_in_generate=True, **options)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    text = tokenizer.decode([token for token in out.sequences[0, ids.shape[1] :].tolist() if token not in ends])
    return text, out.cache if hasattr(out, "cache") else out.past_key_values, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--threshold", type=float, default=None, help="default: the checkpoint's")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
    model = AutoModel.from_pretrained(arguments.model, trust_remote_code=True, dtype="auto")
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages, caches = list(first), None
    asks = sys.stdin.isatty()
    while True:
        print("> ", end="", flush=True) if asks else None
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            messages, caches = list(first), None
        elif line.strip():
            messages.append({"role": "user", "content": line.strip()})
            prompt = prompt_of(tokenizer, messages)
            room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
            if room < 1:
                messages.pop()
                print("  [the conversation has filled the context: /reset begins a new one]\n")
                continue
            streamer = DraftStreamer(tokenizer, model.config.mask_token_id, drafts=sys.stdout.isatty())
            options = {"threshold": arguments.threshold, "max_new_tokens": min(arguments.max_new_tokens, room)}
            text, caches, out = answer(model, tokenizer, prompt, caches, streamer=streamer, **options)
            messages.append({"role": "assistant", "content": text})
            passes = f"{out.num_denoising_passes[0]} denoising and {out.num_commit_passes[0]} commit passes"
            print(f"  [{passes}, {out.tokens_per_forward[0]:.1f} tokens per forward, {out.finish_reason[0]}]\n")


if __name__ == "__main__":
    main()
