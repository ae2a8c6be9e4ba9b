"""Fine-tunes a Clover on chats: one script, on one machine or many.

    python -m clover.training train --model DIR --train_files chats.jsonl --output_dir out
    accelerate launch --config_file training/accelerate/fsdp2.yaml -m clover.training.train --model DIR ... --bf16

Beside the options here all of transformers' TrainingArguments can be given. `--output_dir` gets checkpoints to resume
from (the same command with `--resume_from_checkpoint True`), the finished model, `training.png`, and a report of what
was kept of the data.
"""

import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from datasets import load_from_disk
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from ..objective_clover import Objective
from .conversion_target import keep_record
from .data import Collator, DataOptions, build_rows
from .judge import make_judge, read_questions
from .lora import with_lora
from .plots import Plots
from .trainer import CloverTrainer


@dataclass
class ModelOptions:
    model: str = field(metadata={"help": "a Clover's folder or name; `convert` makes one of a Qwen3.5-MoE"})
    lora_rank: int = field(default=0, metadata={"help": "train adapters of this rank; 0 trains all weights"})
    lora_alpha: int = field(default=32, metadata={"help": "their scale is alpha / rank"})
    attention: str = field(default="sdpa", metadata={"help": "sdpa or eager"})
    experts: str | None = field(default=None, metadata={"help": "grouped_mm, batched_mm or eager"})


@dataclass
class ChatOptions:
    train_files: list[str] = field(default_factory=list, metadata={"help": "chats: .jsonl or .parquet, patterns too"})
    rows: str | None = field(default=None, metadata={"help": "or a folder of rows: what `trajectories` wrote"})
    eval_files: list[str] = field(default_factory=list, metadata={"help": "chats to measure the loss on"})
    questions: str | None = field(default=None, metadata={"help": "JSON lines of chats to answer at each evaluation"})
    max_questions: int | None = field(default=None, metadata={"help": "only the first so many"})
    max_new_tokens: int = field(default=512, metadata={"help": "of an answer"})
    max_length: int = field(default=4096, metadata={"help": "positions of a row"})
    packing: bool = field(default=True, metadata={"help": "several chats a row"})
    too_long: str = field(default="drop", metadata={"help": "what becomes of longer chats: drop, truncate or error"})
    on_bad_row: str = field(default="error", metadata={"help": "error or skip"})
    train_on: str = field(default="all", metadata={"help": "all answers, the last, or each by itself"})
    column: str | None = field(default=None, metadata={"help": "where a row's conversation is, if it cannot be told"})
    template_options: str = field(default="{}", metadata={"help": "JSON: arguments of the chat template"})
    special_tokens: str = field(default="refuse", metadata={"help": "texts that spell one: refuse or allow"})
    num_proc: int = field(default=1, metadata={"help": "processes that encode chats"})
    streaming: bool = field(default=False, metadata={"help": "read as it goes; give --max_steps then"})


@dataclass
class ObjectiveOptions:
    complementary: bool = field(default=Objective.complementary, metadata={"help": "each block with both masks"})
    weighting: str = field(default=Objective.weighting, metadata={"help": "uniform or inverse_ratio"})
    max_weight: float = field(default=Objective.max_weight, metadata={"help": "of inverse_ratio"})
    causal_weight: float = field(default=Objective.causal_weight, metadata={"help": "of the autoregressive loss"})
    tail_weight: float = field(default=Objective.tail_weight, metadata={"help": "of padding after an answer"})
    confidence_weight: float = field(default=Objective.confidence_weight, metadata={"help": "of the entropy term"})


def arguments_of(options: object, kind: type) -> dict:
    """The options that another dataclass has too."""
    return {f.name: getattr(options, f.name) for f in fields(kind) if hasattr(options, f.name)}


def data_options(chat: ChatOptions, size: int, seed: int) -> DataOptions:
    """The data's options; a `ValueError` by name on what they cannot be."""
    try:
        template = json.loads(chat.template_options)
    except json.JSONDecodeError:
        template = chat.template_options  # refused below, with what is allowed
    given = arguments_of(chat, DataOptions) | {"template_options": template, "block_size": size, "seed": seed}
    return DataOptions(**given)


def load(options: ModelOptions, objective: Objective, training: TrainingArguments) -> PreTrainedModel | PeftModel:
    """The model; its weights and optimiser states are kept in fp32, `--bf16` computes in bf16 beside them."""
    implementations = {"attn_implementation": options.attention}
    if options.experts:
        implementations["experts_implementation"] = options.experts
    model = AutoModelForCausalLM.from_pretrained(
        options.model, trust_remote_code=True, dtype=torch.float32, **implementations
    )
    model.objective = type(model.objective)(**vars(objective))  # the class of the model's own code
    model.config.use_cache = False
    if options.lora_rank:
        model = with_lora(model, options.lora_rank, options.lora_alpha)
        if training.gradient_checkpointing:
            model.enable_input_require_grads()
    return model


def check(chat: ChatOptions, training: TrainingArguments) -> None:
    """Raises a `ValueError` on what could not be done, before any work starts."""
    if bool(chat.train_files) == bool(chat.rows):
        raise ValueError(f"`train_files` are {chat.train_files} and `rows` {chat.rows}: one of them must be given")
    if chat.questions and training.fsdp:
        raise ValueError("`questions` are not answered under FSDP, which shards what generation reads: evaluate a save")
    if chat.streaming and training.max_steps <= 0:
        raise ValueError(f"`max_steps` is {training.max_steps}, but must be given with `streaming`: no end is known")
    if training.eval_strategy != "no" and not (chat.eval_files or chat.questions):
        raise ValueError(f"`eval_strategy` is {training.eval_strategy}, but there are no `eval_files` or `questions`")


def main(arguments: list[str] | None = None) -> CloverTrainer:
    parser = HfArgumentParser((ModelOptions, ChatOptions, ObjectiveOptions, TrainingArguments), description=__doc__)
    model_options, chat, objective_options, training = parser.parse_args_into_dataclasses(arguments)
    training.remove_unused_columns, training.prediction_loss_only = False, True
    training.label_names = ["labels"]
    check(chat, training)
    if chat.streaming:  # each process reads the stream and keeps its own rows: batches of one length are not needed
        training.accelerator_config.dispatch_batches = False
    set_seed(training.seed)
    objective = Objective(**arguments_of(objective_options, Objective))
    # Everything is read before the model, which may take long to load.
    size = AutoConfig.from_pretrained(model_options.model, trust_remote_code=True).block_size
    options = data_options(chat, size, training.seed)
    questions = read_questions(Path(chat.questions), chat.max_questions) if chat.questions else []
    tokenizer = AutoTokenizer.from_pretrained(model_options.model, trust_remote_code=True)
    if chat.rows:
        rows, report = load_from_disk(chat.rows), f"{chat.rows}: rows as they are"
    else:
        with training.main_process_first():  # the others find what it has encoded
            rows, report = build_rows(chat.train_files, tokenizer, options, streaming=chat.streaming)
    eval_rows = build_rows(chat.eval_files, tokenizer, options)[0] if chat.eval_files else None
    trainer = CloverTrainer(
        model=load(model_options, objective, training),
        args=training,
        train_dataset=rows,
        eval_dataset=eval_rows if eval_rows is not None else rows.select(range(1)) if questions else None,
        data_collator=Collator(tokenizer.pad_token_id, size),
        processing_class=tokenizer,
        callbacks=[Plots()],
    )
    if questions:
        trainer.judge = make_judge(tokenizer, questions, trainer.accelerator, max_new_tokens=chat.max_new_tokens)
    if not chat.streaming and trainer.is_world_process_zero():
        print(report, file=sys.stderr)
    resume = training.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=resume if resume not in (None, "False") else None)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        keep_record(Path(model_options.model), Path(training.output_dir))
    if chat.streaming and trainer.is_world_process_zero():
        print(report, file=sys.stderr)
    return trainer


if __name__ == "__main__":
    main()
