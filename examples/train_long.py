"""Train the GPT of train_lm.py on sequences of 128k to 1M tokens, split over the GPUs of torchrun.

    python examples/train_long.py --size 25m --context 131072 --out out/long                                  # one GPU
    torchrun --nproc-per-node 8 examples/train_long.py --size 124m --context 1048576 --out out/million
    torchrun --nproc-per-node 8 examples/train_long.py --size 124m --every 3 --layout zigzag --out out/hybrid
    torchrun --nproc-per-node 2 examples/train_long.py --n-layer 2 --n-head 2 --n-embd 64 --context 512       # without a GPU

Each rank holds a part of the tokens of every sequence (`fastmax.distributed.ContextParallel`) and a shard of the weights,
gradients and optimizer states (`fully_shard`). The loss is the mean over the tokens of all ranks. Tokens are bytes.

Run the same command again to resume, with any number of ranks. A checkpoint of `torch.distributed.checkpoint` is written with
every row of losses and on SIGTERM and SIGINT. OUT receives checkpoints/ and losses.csv.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import torch
from model import GPT
from options import count
from text import NO_TARGET, Batch, Text, byte_tokens, load_documents, packed_windows, random_windows
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from train_lm import add_model_arguments, add_training_arguments, make_config, parse
from training import Recipe, autocast, learning_rate, make_optimizer, write_csv

from fastmax.distributed import ContextParallel

MAY_CHANGE = {"out", "fresh", "layout", "recompute", "rows", "device"}  # when a run is resumed, as may the number of ranks


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_training_arguments(parser, steps=100, warmup=10, val_batches=1, out=Path("out/long"))
    parser.add_argument("--context", type=count, default=131072, help="tokens of a sequence, over all ranks")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous", help="zigzag: for softmax layers")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--recompute", action=switch, default=True, help="activation checkpointing of each block")
    return parser


class LongTrainer:
    """Trains a GPT whose tokens and weights are sharded over a mesh. All ranks must call every method.

    Args:
        model: the unsharded model, identical on all ranks, on the device of the rank.
        mesh: with one dimension.
        layout, recompute, bf16: as in `arguments`.
    """

    def __init__(self, model: GPT, recipe: Recipe, mesh: DeviceMesh, layout: str, recompute: bool, bf16: bool):
        self.model, self.recipe, self.mesh, self.bf16 = model, recipe, mesh, bf16
        self.device = next(model.parameters()).device
        parallelize_module(model, mesh, {"blocks.*.attn": ContextParallel(layout)})
        self.context = model.blocks[0].attn.context
        for block in model.blocks:
            if recompute:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.optimizer = make_optimizer(model, recipe)
        self.step, self.seconds, self.history = 0, 0.0, []

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Returns this rank's part of the mean loss of a sequence, and its number of tokens with a target over all ranks."""
        total = int((batch.targets != NO_TARGET).sum())
        tokens, targets = (self.context.own(x, 1).to(self.device) for x in (batch.tokens, batch.targets))
        cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(self.device)
        with autocast(self.device, self.bf16):
            return self.model(tokens, targets, cu_seqlens=cu_seqlens, reduction="sum") / total, total

    def train_step(self, batch: Batch) -> Tensor:
        """Trains on a batch; returns this rank's part of its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, self.step / self.recipe.steps)
        loss = self.gradients(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss

    def gradients(self, batch: Batch) -> Tensor:
        """Computes gradients of the mean loss over all tokens; returns this rank's part of the loss."""
        loss, _ = self.loss(batch)
        # The loss is the sum of the ranks' parts, while fully_shard averages gradients.
        (loss * self.mesh.size()).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> float:
        own = sum(loss * total for loss, total in map(self.loss, batches))
        return self.sum(own) / sum(int((batch.targets != NO_TARGET).sum()) for batch in batches)

    def sum(self, *values: Tensor | float) -> float | list[float]:
        """Returns sums over ranks."""
        totals = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in values])
        distributed.all_reduce(totals, group=self.mesh.get_group())
        return totals.item() if len(values) == 1 else totals.tolist()

    def save(self, out: Path, settings: dict, generator: torch.Generator) -> None:
        """Saves a checkpoint. `latest` names it once all ranks have written it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        run = {"settings": settings, "step": self.step, "seconds": self.seconds, "history": self.history}
        state = {"model": model, "optimizer": optimizer, "generator": generator.get_state(), "run": json.dumps(run)}
        path = out / "checkpoints" / f"step-{self.step}"
        dcp.save(state, checkpoint_id=path, process_group=self.mesh.get_group())
        if self.mesh.get_rank() == self.mesh.mesh[0]:
            unfinished = path.parent / "latest.unfinished"
            unfinished.write_text(path.name)
            os.replace(unfinished, path.parent / "latest")
            for old in path.parent.glob("step-*"):
                if old != path:
                    shutil.rmtree(old)
        distributed.barrier(group=self.mesh.get_group())

    def load(self, out: Path, settings: dict, generator: torch.Generator) -> None:
        """Loads the latest checkpoint, which any number of ranks may have written.

        Raises:
            SystemExit: the checkpoint is of another run.
        """
        path = out / "checkpoints" / (out / "checkpoints" / "latest").read_text()
        run, group = {"run": ""}, self.mesh.get_group()
        dcp.load(run, checkpoint_id=path, process_group=group)
        run = json.loads(run["run"])
        was = run["settings"]
        changed = [f"{name} was {was.get(name)}, is {value}" for name, value in settings.items() if was.get(name) != value]
        if changed:
            raise SystemExit(f"{path} is of another run ({'; '.join(changed)}): pass --fresh to overwrite it, or another --out")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "generator": generator.get_state()}
        dcp.load(state, checkpoint_id=path, process_group=group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        generator.set_state(state["generator"])
        self.step, self.seconds, self.history = run["step"], run["seconds"], run["history"]


def settings_of(args: argparse.Namespace, text: Text) -> dict:
    """Returns settings that must not change when a run is resumed."""
    chosen = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    return chosen | {"text": f"{len(text.tokens)} tokens, CRC {zlib.crc32(text.tokens.numpy()):08x}"}


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device, stopping: list[int]) -> LongTrainer:
    """Trains on all ranks of the mesh until the steps are done, or `stopping` of any rank is not empty."""
    is_first = mesh.get_rank() == mesh.mesh[0]
    text = byte_tokens(load_documents(args.data))
    parts = [part if args.packed else part.tokens for part in text.split()]
    draw = partial(packed_windows if args.packed else random_windows, block_size=args.context, batch_size=1)
    always_the_same = torch.Generator().manual_seed(0)
    validation = [draw(parts[1], generator=always_the_same) for _ in range(args.val_batches)]

    args.block_size = args.context
    torch.manual_seed(args.seed)
    model = GPT(make_config(args, vocab_size=256)).to(device)
    chosen = {name: getattr(args, name) for name in ("rows", "lr", "warmup", "weight_decay")}
    trainer = LongTrainer(model, Recipe(args.steps, **chosen), mesh, args.layout, args.recompute, args.bf16)
    generator, settings = torch.Generator().manual_seed(args.seed), settings_of(args, text)
    if (args.out / "checkpoints" / "latest").exists() and not args.fresh:
        trainer.load(args.out, settings, generator)

    every, losses, began = max(1, args.steps // args.rows), [], time.perf_counter() - trainer.seconds
    progress = tqdm(total=args.steps, initial=trainer.step, unit="step", disable=not is_first)
    stops = False
    while trainer.step < args.steps and not stops:
        batch = draw(parts[0], generator=generator)  # the same on every rank
        loss, stops = trainer.sum(trainer.train_step(batch), float(len(stopping) > 0))
        losses.append(loss)
        trainer.seconds = time.perf_counter() - began
        progress.update()
        if trainer.step % every == 0 or trainer.step == args.steps or stops:
            row = {"step": trainer.step, "tokens": trainer.step * args.context, "seconds": trainer.seconds}
            row |= {"train": sum(losses) / len(losses), "val": trainer.evaluate(validation), "ranks": mesh.size()}
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            trainer.history.append(row)
            losses = []
            trainer.save(args.out, settings, generator)
            if is_first:
                write_csv(trainer.history, args.out / "losses.csv")
            progress.set_postfix(train=f"{row['train']:.3f}", val=f"{row['val']:.3f}")
            began = time.perf_counter() - trainer.seconds
    progress.close()
    return trainer


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    args = parse(parser, argv)
    try:
        with torch.device("meta"):
            args.block_size = args.context
            GPT(make_config(args, vocab_size=256))
    except (TypeError, ValueError) as error:  # wrong --parts are reported before the text is read
        parser.error(str(error))
    kind = torch.device(args.device).type
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # set by torchrun
        distributed.init_process_group()
    else:
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(kind, (distributed.get_world_size(),))
    stopped_by = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped_by.append(number))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        trainer = train(args, mesh, device, stopped_by)
        if mesh.get_rank() == 0:
            row, parameters = trainer.history[-1], sum(x.numel() for x in trainer.model.parameters())
            print(f"{parameters / 1e6:.1f} M parameters, {args.context} tokens of context, {mesh.size()} ranks on {kind}")
            print(f"step {row['step']} of {args.steps}: train {row['train']:.4f}, validation {row['val']:.4f} nats per token")
            print(f"tokens/s  {row['tokens'] / row['seconds']:,.0f}")
            if row["peak_bytes"] is not None:
                print(f"peak memory of a rank  {row['peak_bytes'] / 2**20:,.0f} MiB")
            print(f"wrote checkpoints/ and losses.csv to {args.out}")
        return 0 if trainer.step >= args.steps else 128 + (stopped_by or [signal.SIGTERM])[-1]
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
