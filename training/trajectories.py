"""A model's own answers, one token per pass: what distillation trains on.

    python -m clover.training trajectories --model DIR --questions chats.jsonl --out rows/
    python -m clover.training train --model DIR --rows rows/ --complementary False --confidence_weight 0.5 ...

The teacher is the model itself, in the way in which it makes fewest mistakes. Two ways are one token per pass:

`low_confidence`, denoising with a threshold of 1. A student that sees the states on that way, what was decoded first
shown and what came last masked, and is to say all of the rest at once, learns to jump (the trajectories of d3LLM).
`self_speculative`, what the model writes autoregressively, drafted so as to be had sooner. No state of a block is on
that way, so the student sees random masks; it learns to denoise what the causal pass, which may know more, writes.

An entropy term where the student is right makes it sure enough to pass the threshold (CAP, of LLaDA2.0). All keep the
teacher's own tokens as targets, so nothing else is taught.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from ..objective_clover import IGNORED
from .folders import config_of
from .judge import ONE_TOKEN_PER_PASS, Question, check_fit, prompts_of, read_questions
from .tasks import final_part

TEACHERS = ("low_confidence", "self_speculative")


@torch.no_grad()
def trajectories(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    seed: int = 0,
    only_right: bool = True,
    batch_size: int = 32,
    decoding: str = "low_confidence",
    **generate_options,
) -> Iterator[dict]:
    """Rows for training, a document each: `input_ids`, `labels`, `document_ids`, `noise_seed`, and `decoding_order`.

    `decoding_order` is the pass, over all of the answer, at which each position was decoded; the positions that were
    still masked when it ended come last. Autoregressive answers, `decoding="self_speculative"`, have none. Answers that
    did not end, or, with `only_right`, that are not the reference, are left out.
    """
    options = {"decoding": decoding, "output_trace": True, "return_dict_in_generate": True} | generate_options
    if decoding == "low_confidence":
        options["threshold"] = ONE_TOKEN_PER_PASS
    rng = random.Random(seed)
    for at in tqdm(range(0, len(questions), batch_size), desc="batches of questions"):
        batch = questions[at : at + batch_size]
        inputs = prompts_of(tokenizer, batch, model.device)
        out = model.generate(**inputs, **options)
        for row, question in enumerate(batch):
            prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
            answer = [token for step in out.trace[row] for token in step.settled]
            text = tokenizer.decode(answer[:-1])
            right = final_part(text) == final_part(question.reference)
            if out.finish_reason[row] == "stop" and (right or not only_right):
                made = row_of(prompt, answer, model.config.block_size, tokenizer.pad_token_id)
                if decoding == "low_confidence":
                    positions = [step.positions for step in out.trace[row]]
                    made["decoding_order"] = order_of(positions, len(made["input_ids"]))
                yield made | {"noise_seed": rng.getrandbits(62)}


def row_of(prompt: list[int], answer: list[int], size: int, pad_token_id: int) -> dict:
    """One document, padded to whole blocks."""
    ids, labels = prompt + answer, [IGNORED] * len(prompt) + answer
    missing = -len(ids) % size
    return {
        "input_ids": ids + [pad_token_id] * missing,
        "labels": labels + [IGNORED] * missing,
        "document_ids": [0] * len(ids) + [-1] * missing,
    }


def order_of(positions: list[list[int]], width: int) -> list[int]:
    """The pass that decoded each of a row's positions; `positions` are what each pass decoded, from the row's start."""
    order = [len(positions)] * width
    for number, decoded in enumerate(positions):
        for position in decoded:
            if position < width:
                order[position] = number
    return order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="the teacher, and what is to be trained")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines of chats; their last answers judge")
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows to write")
    parser.add_argument("--limit", type=int, help="only the first so many questions")
    parser.add_argument("--keep-wrong", action="store_true", help="also answers that are not the reference")
    parser.add_argument("--decoding", choices=TEACHERS, default=TEACHERS[0], help="how the teacher answers")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} is there already: remove it, or name another folder")
    if arguments.batch_size < 1:
        raise ValueError(f"`--batch-size` is {arguments.batch_size}, but must be at least 1")
    config, questions = config_of(arguments.model), read_questions(arguments.questions, arguments.limit)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
    check_fit(tokenizer, questions, arguments.max_new_tokens, config.max_position_embeddings)
    model = AutoModel.from_pretrained(arguments.model, trust_remote_code=True).eval()
    rows = list(
        trajectories(
            model,
            tokenizer,
            questions,
            seed=arguments.seed,
            only_right=not arguments.keep_wrong,
            batch_size=arguments.batch_size,
            decoding=arguments.decoding,
            max_new_tokens=arguments.max_new_tokens,
        )
    )
    if not rows:
        raise ValueError(f"none of {len(questions)} answers ended and was right: there is nothing to learn from")
    Dataset.from_list(rows).save_to_disk(arguments.out)
    print(f"{arguments.out}: {len(rows)} rows of {len(questions)} questions")
    return 0
