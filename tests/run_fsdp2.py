"""Run by torchrun on two processes: one step of a model sharded by FSDP2, as accelerate shards it, and of a whole one.

Prints, as JSON, the losses and the worst difference of a gradient. accelerate itself has FSDP for accelerators alone;
torch's `fully_shard`, which it calls, runs on a CPU too.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from small_clover import draw
from test_objective import ROWS, packed


def main() -> None:
    dist.init_process_group("gloo")
    rank, batch = dist.get_rank(), packed(ROWS)
    items = (batch["labels"] != -100).sum()
    mine = {name: value[:2] if rank == 0 else value[2:] for name, value in batch.items()}
    results = []
    for sharded in (False, True):
        model = draw().train()
        if sharded:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        # FSDP divides gradients by the number of processes, as DDP does; the Trainer multiplies the loss by it.
        inputs = mine if sharded else batch
        out = model(**inputs, num_items_in_batch=items)
        (out.loss * (dist.get_world_size() if sharded else 1)).backward()
        gradients = {n: p.grad.full_tensor() if sharded else p.grad for n, p in model.named_parameters()}
        loss = out.loss.detach().clone()
        if sharded:
            dist.all_reduce(loss)
        results.append((loss.item(), gradients))
    (loss, whole), (sharded_loss, parts) = results
    worst = max((whole[name] - parts[name]).abs().max().item() for name in whole)
    largest = max(gradient.abs().max().item() for gradient in whole.values())
    if rank == 0:
        print(json.dumps({"loss": loss, "sharded": sharded_loss, "worst": worst, "largest": largest}))
    dist.barrier()  # so that neither leaves while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
