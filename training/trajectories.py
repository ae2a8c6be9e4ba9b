"""A model's own answers, one token per pass, and in which order it decoded them: what distillation trains on.

    python -m clover.training trajectories --model DIR --questions chats.jsonl --out rows/
    python -m clover.training train --model DIR --rows rows/ --complementary False --confidence_weight 0.5 ...

Decoded one token per pass a model makes fewest mistakes, and most passes. A student that sees the states on that way,
what was decoded first shown and what came last masked, and is to say all of the rest at once, learns to jump (the
trajectories of d3LLM); an entropy term where it is right makes it sure enough to pass the threshold (CAP, of
LLaDA2.0). Both keep the teacher's own tokens as targets, so nothing else is taught.
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


@torch.no_grad()
def trajectories(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    seed: int = 0,
    only_right: bool = True,
    batch_size: int = 32,
    **generate_options,
) -> Iterator[dict]:
    """Rows for training, a document each: `input_ids`, `labels`, `document_ids`, `decoding_order`, `noise_seed`.

    `decoding_order` is the pass, over all of the answer, at which each position was decoded; the positions that were
    still masked when it ended come last. Answers that did not end, or, with `only_right`, that are not the reference,
    are left out.
    """
    rng = random.Random(seed)
    for at in tqdm(range(0, len(questions), batch_size), desc="batches of questions"):
        batch = questions[at : at + batch_size]
        inputs = prompts_of(tokenizer, batch, model.device)
        options = {"threshold": ONE_TOKEN_PER_PASS, "output_trace": True, "return_dict_in_generate": True}
        out = model.generate(**inputs, **options, **generate_options)
        for row, question in enumerate(batch):
            prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
            answer = [token for step in out.trace[row] for token in step.settled]
            text = tokenizer.decode(answer[:-1])
            right = final_part(text) == final_part(question.reference)
            if out.finish_reason[row] == "stop" and (right or not only_right):
                positions = [step.positions for step in out.trace[row]]
                yield row_of(prompt, answer, positions, model.config.block_size, tokenizer, rng.getrandbits(62))


def row_of(
    prompt: list[int],
    answer: list[int],
    positions: list[list[int]],
    size: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> dict:
    """One row, padded to whole blocks. `positions` are what each pass decoded, counted from the prompt's start."""
    ids, labels = prompt + answer, [IGNORED] * len(prompt) + answer
    missing = -len(ids) % size
    order = [len(positions)] * (len(ids) + missing)
    for number, decoded in enumerate(positions):
        for position in decoded:
            if position < len(order):
                order[position] = number
    return {
        "input_ids": ids + [tokenizer.pad_token_id] * missing,
        "labels": labels + [IGNORED] * missing,
        "document_ids": [0] * len(ids) + [-1] * missing,
        "decoding_order": order,
        "noise_seed": seed,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="the teacher, and what is to be trained")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines of chats; their last answers judge")
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows to write")
    parser.add_argument("--limit", type=int, help="only the first so many questions")
    parser.add_argument("--keep-wrong", action="store_true", help="also answers that are not the reference")
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
            max_new_tokens=arguments.max_new_tokens,
        )
    )
    if not rows:
        raise ValueError(f"none of {len(questions)} answers ended and was right: there is nothing to learn from")
    Dataset.from_list(rows).save_to_disk(arguments.out)
    print(f"{arguments.out}: {len(rows)} rows of {len(questions)} questions")
    return 0
