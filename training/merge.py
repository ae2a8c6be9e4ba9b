"""Makes one checkpoint of a Clover and what LoRA trained of it; nothing of PEFT is needed to use it."""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from ..modeling_clover import CloverForDiffusionLM
from .conversion_target import keep_record
from .folders import ADAPTER, config_of
from .lora import merged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the Clover that was trained")
    parser.add_argument("--adapter", type=Path, required=True, help="the folder of adapter and added tensors")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")


def run(arguments: argparse.Namespace) -> int:
    if arguments.to.exists():
        raise ValueError(f"{arguments.to} is there already: remove it, or name another folder")
    if not (arguments.adapter / ADAPTER).is_file():
        raise ValueError(f"{arguments.adapter} holds no LoRA adapter: there is no {ADAPTER}")
    config_of(arguments.model)
    base = CloverForDiffusionLM.from_pretrained(arguments.model, dtype=torch.float32)
    base.register_for_auto_class("AutoModel")  # its code is saved with it
    model = merged(base, arguments.adapter)
    for name, parameter in model.named_parameters():
        if "bd_softmax" not in name:  # these stay in fp32
            parameter.data = parameter.data.to(getattr(torch, arguments.dtype))
    model.save_pretrained(arguments.to)
    AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True).save_pretrained(arguments.to)
    keep_record(arguments.model, arguments.to)
    return 0
