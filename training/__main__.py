"""Commands around training.

    python -m clover.training convert --from QWEN --to DIR       # a Clover of a Qwen3.5-MoE checkpoint
    python -m clover.training convert --reverse --from CLOVER --to DIR
    python -m clover.training train --model DIR --train_files FILE --output_dir OUT      # see `train.py`
    python -m clover.training merge --model DIR --adapter OUT --to DIR                   # after LoRA
    python -m clover.training trajectories --model DIR --questions FILE --out ROWS       # to distil from
    python -m clover.training ladder --row NAME DIR DECODING ...                         # compares checkpoints
    python -m clover.training chats --split train --count 6000 --out FILE                # the small model's own data

A command is a module with `add_arguments(parser)` and `run(arguments)`, which returns the exit status.
"""

import argparse
import sys

from . import chats, convert, ladder, merge, train, trajectories
from .commands import status_of

COMMANDS = {
    "convert": convert,
    "train": train,
    "merge": merge,
    "trajectories": trajectories,
    "ladder": ladder,
    "chats": chats,
}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    whole = argparse.ArgumentParser(prog="python -m clover.training", description=__doc__, formatter_class=raw)
    commands = whole.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=raw)
        if module is not train:
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return whole


def run() -> int | None:
    if sys.argv[1:2] == ["train"]:  # whose arguments are dataclasses, as transformers' are
        train.main(sys.argv[2:])
        return None
    arguments = parser().parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(status_of(run))
