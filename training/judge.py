"""What a model can do by generation: exact match with reference answers, and tokens per forward."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .tasks import final_part

ONE_TOKEN_PER_PASS = 1.0  # a confidence is never above 1, so every pass accepts its best position alone


@dataclass(frozen=True)
class Question:
    """Messages that end before an answer, the tools that were offered, and the answer to compare with."""

    messages: tuple[dict, ...]
    tools: tuple[dict, ...] | None
    reference: str


@dataclass(frozen=True)
class Given:
    """An answer that was generated: its text, whether it ended by itself, its tokens and passes."""

    text: str
    ended: bool
    tokens: int
    denoising: int
    commits: int


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of JSON lines with `messages`, of which the last one is the reference, and `tools` if there are.

    Raises:
        ValueError: a line that is no such thing; with its number.
    """
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if limit is not None and len(questions) == limit:
            break
        try:
            entry = json.loads(line)
            *asked, last = entry["messages"]
            if last["role"] != "assistant" or not asked:
                raise ValueError("the last message must be an assistant's, after others")
            tools = entry.get("tools")
            questions.append(Question(tuple(asked), tuple(tools) if tools else None, last["content"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}: no `messages` with an answer at their end") from None
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


@torch.no_grad()
def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[Question], **generate_options
) -> list[Given]:
    """The model's answers to a batch of questions."""
    inputs = prompts_of(tokenizer, questions, model.device)
    out = model.generate(**inputs, **generate_options, return_dict_in_generate=True)
    new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    if generate_options.get("decoding") == "autoregressive":  # transformers' own: each token is a causal pass
        return [autoregressive(tokenizer, model.generation_config.eos_token_id, tokens) for tokens in new]
    found = []
    for row, tokens in enumerate(new):
        passes = out.num_denoising_passes[row], out.num_commit_passes[row]
        length = round(out.tokens_per_forward[row] * sum(passes))
        ended = out.finish_reason[row] == "stop"
        found.append(Given(tokenizer.decode(tokens[: length - ended]), ended, length, *passes))
    return found


def autoregressive(tokenizer: PreTrainedTokenizerBase, eos: int | list[int], tokens: list[int]) -> Given:
    ends = [i + 1 for i, token in enumerate(tokens) if token in (eos if isinstance(eos, list) else [eos])]
    length = ends[0] if ends else len(tokens)
    return Given(tokenizer.decode(tokens[: length - bool(ends)]), bool(ends), length, 0, length)


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, questions: list[Question], device: torch.device
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (B, P), padded on the left."""
    template = {"add_generation_prompt": True, "tokenize": False}
    prompts = [
        tokenizer.apply_chat_template(list(q.messages), tools=list(q.tools) if q.tools else None, **template)
        for q in questions
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def make_judge(
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    accelerator: Accelerator,
    batch_size: int = 16,
    **generate_options,
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """A function of a model to its exact match (%) and tokens per forward; processes share the questions."""

    def judge(model: PreTrainedModel) -> dict[str, float]:
        mine = questions[accelerator.process_index :: accelerator.num_processes]
        right = tokens = passes = 0
        for at in range(0, len(mine), batch_size):
            batch = mine[at : at + batch_size]
            for question, given in zip(batch, answered(model, tokenizer, batch, **generate_options), strict=True):
                right += given.ended and final_part(given.text) == final_part(question.reference)
                tokens, passes = tokens + given.tokens, passes + given.denoising + given.commits
        sums = torch.tensor([right, tokens, passes], dtype=torch.float64, device=accelerator.device)
        right, tokens, passes = accelerator.reduce(sums).tolist()
        return {"exact_match": 100 * right / len(questions), "tokens_per_forward": tokens / max(1, passes)}

    return judge
