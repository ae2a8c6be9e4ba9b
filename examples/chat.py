"""A chat in the terminal: text as it settles, and behind it the draft of the block in progress.

    python examples/chat.py
    python examples/chat.py --threshold 0.8 --system "Be brief."
    printf 'Convert 12 kg to g.\nWhat is 482 + 377?\n' | python examples/chat.py     # no drafts where nobody looks

`/reset` forgets the conversation, `/quit` or the end of input leaves. Each turn goes on from the cache of the one
before it, if the conversation still begins with the very tokens that cache is of.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, TextStreamer

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
SAVE, RESTORE, DIM, PLAIN = "\0337", "\0338\033[J", "\033[2m", "\033[0m"


class DraftStreamer(TextStreamer):
    """Prints settled text; on a terminal also the rest of the block, dimmed, until something takes its place."""

    def __init__(self, tokenizer, mask_token_id: int, drafts: bool):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.mask_token_id, self.drafts, self.drafted = mask_token_id, drafts, False

    def put(self, value: torch.Tensor) -> None:
        self._clear()
        super().put(value)

    def put_draft(self, value: torch.Tensor) -> None:
        if self.drafts:
            self._clear()
            pieces = [
                "·" if token == self.mask_token_id else self.tokenizer.decode([token]) for token in value.tolist()
            ]
            print(SAVE + DIM + "".join(pieces).replace("\n", "⏎") + PLAIN, end="", flush=True)
            self.drafted = True

    def end(self) -> None:
        self._clear()
        super().end()

    def _clear(self) -> None:
        if self.drafted:
            print(RESTORE, end="", flush=True)
            self.drafted = False


def fitting(caches: list | None, prompt: torch.Tensor) -> list | None:
    """The caches of the last answer, if the new prompt begins with the tokens that they are of."""
    if caches is None:
        return None
    known = caches[0].ids[0]
    return caches if torch.equal(known, prompt[0, : len(known)]) else None


def answer(model, tokenizer, messages: list[dict], caches: list | None, **options) -> tuple[str, list, object]:
    """The answer to a conversation, the caches to go on from, and generate()'s whole output."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = inputs["input_ids"]
    out = model.generate(
        prompt,
        attention_mask=inputs["attention_mask"],
        past_key_values=fitting(caches, prompt),
        return_dict_in_generate=True,
        **options,
    )
    text = tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
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
            streamer = DraftStreamer(tokenizer, model.config.mask_token_id, drafts=sys.stdout.isatty())
            options = {"threshold": arguments.threshold, "max_new_tokens": arguments.max_new_tokens}
            text, caches, out = answer(model, tokenizer, messages, caches, streamer=streamer, **options)
            messages.append({"role": "assistant", "content": text})
            passes = f"{out.num_denoising_passes[0]} denoising and {out.num_commit_passes[0]} commit passes"
            print(f"  [{passes}, {out.tokens_per_forward[0]:.1f} tokens per forward, {out.finish_reason[0]}]\n")


if __name__ == "__main__":
    main()
