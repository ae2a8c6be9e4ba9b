"""Writes the small model's generated conversations as chats, which fine-tuning and its questions read."""

import argparse
from pathlib import Path

from .corpus import write_chats
from .tasks import TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=("train", "heldout"), required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), help="only of these kinds")


def run(arguments: argparse.Namespace) -> int:
    if arguments.count < 1:
        raise ValueError(f"`--count` is {arguments.count}, but must be at least 1")
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} is there already: remove it, or name another file")
    write_chats(arguments.out, arguments.split, arguments.count, arguments.seed, arguments.tasks)
    return 0
