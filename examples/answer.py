"""Answers one request and shows each block being filled.

    python examples/answer.py "What is 482 + 377?"
    python examples/answer.py --threshold 1.0 "What is 482 + 377?"      # one token per pass
    python examples/answer.py --model DIR "..."                         # another checkpoint

A line is one denoising pass: what is still masked is a dot, what the pass has just filled is green (or in [brackets]
where the output is not a terminal), and "_" is the padding after the answer's end. `--svg FILE` draws a picture of it.
"""

import argparse
import html
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"
GREEN, RESET = "\x1b[32;1m", "\x1b[0m"


def visible(text: str) -> str:
    """Text on one line: line ends become signs."""
    return text.replace("\n", "\u23ce")


class Film:
    """Collects the passes and prints them as they come."""

    def __init__(self, tokenizer, mask_token_id: int, colour: bool):
        self.tokenizer, self.mask_token_id = tokenizer, mask_token_id
        self.marks = (GREEN, RESET) if colour else ("[", "]")
        self.frames: list[list[tuple[str, bool]]] = []  # per pass: the block's tokens, and whether just filled

    def __call__(self, row: int, step, block: list[int]) -> None:
        start = step.block * len(block)
        fresh = {position - start for position in step.positions}
        signs = {self.mask_token_id: "\u00b7", self.tokenizer.pad_token_id: "_"}
        frame = [
            (signs.get(token) or visible(self.tokenizer.decode([token])), i in fresh) for i, token in enumerate(block)
        ]
        self.frames.append(frame)
        marked = "".join(f"{self.marks[0]}{text}{self.marks[1]}" if new else text for text, new in frame)
        print(f"block {step.block} pass {step.step + 1:2} \u2502 {marked}", flush=True)


def svg(frames: list[list[tuple[str, bool]]]) -> str:
    """The passes as a picture: a row for each, new tokens on green, masked positions as empty cells."""
    size, line, left = 11, 22, 8
    rows = []
    for at, frame in enumerate(frames):
        x, y = left, line * (at + 1)
        for text, new in frame:
            width = max(8, int(len(text) * size * 0.62) + 4)
            masked = text == "\u00b7"
            fill = "#a5d6a7" if new else "#eeeeee" if masked else "#ffffff"
            rows.append(
                f'<rect x="{x}" y="{y - 15}" width="{width - 1}" height="19" rx="2" fill="{fill}" stroke="#cccccc"/>'
            )
            if not masked:
                rows.append(f'<text x="{x + 2}" y="{y}" xml:space="preserve">{html.escape(text)}</text>')
            x += width
        rows.append(f"<!-- width {x} -->")
    widths = [int(row.split()[2]) for row in rows if row.startswith("<!--")]
    body = "\n".join(row for row in rows if not row.startswith("<!--"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(widths) + left}" height="{line * len(frames) + 14}" '
        f'font-family="monospace" font-size="{size}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request")
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--threshold", type=float, default=None, help="default: the checkpoint's")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--svg", type=Path, help="draw the passes to this file")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
    model = AutoModel.from_pretrained(arguments.model, trust_remote_code=True, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.request}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    film = Film(tokenizer, model.config.mask_token_id, colour=sys.stdout.isatty())
    options = {} if arguments.threshold is None else {"threshold": arguments.threshold}
    out = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=arguments.max_new_tokens,
        return_dict_in_generate=True,
        callback=film,
        **options,
    )
    answer = out.sequences[0, prompt["input_ids"].shape[1] :]
    print("\n" + tokenizer.decode(answer, skip_special_tokens=True))
    print(
        f"\n{len(answer)} tokens in {out.num_denoising_passes[0]} denoising and {out.num_commit_passes[0]} commit "
        f"passes: {out.tokens_per_forward[0]:.1f} tokens per forward ({out.finish_reason[0]})"
    )
    if arguments.svg:
        arguments.svg.write_text(svg(film.frames))


if __name__ == "__main__":
    main()
