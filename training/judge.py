"""What a model can do by generation: exact match with reference answers, and tokens per forward."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chat_files import load_chat
from .chat_records import conversation_of
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


def read_questions(path: Path | str, limit: int | None = None) -> list[Question]:
    """Questions of chats in any form that is trained on (see `chat_files`); their last answers are the references.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row that is no such thing, with its place; or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit of questions is {limit}, but must be at least 1")
    questions, records = [], load_chat([str(path)])
    for row in records if limit is None else records.select(range(min(limit, len(records)))):
        try:
            chat = conversation_of(row["record"])
            *asked, last = chat.messages
            if not asked or last["role"] != "assistant":
                raise ValueError("there is nothing before the answer")
        except ValueError as error:
            raise ValueError(f"{row['source']}: {error}") from None
        if last.get("tool_calls"):
            raise ValueError(f"{row['source']}: the last answer calls a tool, which is not compared with what is said")
        questions.append(Question(tuple(asked), chat.tools, last["content"]))
    return questions


def check_fit(tokenizer: PreTrainedTokenizerBase, questions: list[Question], max_new_tokens: int, context: int) -> None:
    """Raises a `ValueError` on a question whose prompt and answer do not fit into the context."""
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` is {max_new_tokens}, but must be at least 1")
    for number, question in enumerate(questions, start=1):
        length = prompts_of(tokenizer, [question], torch.device("cpu"))["input_ids"].shape[1]
        if length + max_new_tokens > context:
            raise ValueError(
                f"`max_new_tokens` is {max_new_tokens}, but question {number} has {length} tokens of a context of "
                f"{context}: it must be at most {context - length}"
            )


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
