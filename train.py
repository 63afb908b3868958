"""Train a decoder: python train.py model=diff size=micro data=stdlib, or torchrun --nproc_per_node=8 train.py ..."""
# The code below reads from top to bottom in the order in which it runs: data, model, optimizers, run folder, training loop.

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

# libgomp reads this when torch loads it: beside other processes, threads that wait sleep sooner (docs/PERFORMANCE.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
from hydra.core.hydra_config import HydraConfig

from configs import command
from data.loader import Loader, Mixture, Prefetcher, hash_seed, inputs_and_targets
from data.stream import open_sources, open_tokenizer, text_digest
from model.decoder import Decoder
from training import checkpoint
from training.distributed import World, join_world, pick_dtype, slow_bfloat16
from training.guard import Diverged, Guard
from training.memory import micro_batch_that_fits
from training.metrics import Metrics, Stopwatch, clock, last_val_loss, log_line, memory_gb, peak_flops
from training.monitor import monitor_of
from training.needle import NeedleProbe
from training.optim import build_optimizers, set_lr
from training.parallel import Parallel
from training.run import TrainConfig, compiles, default_run_dir, facts, fill_model, launcher, origin, start_or_resume
from training.saver import Saver
from training.schedule import check_warmup, lr_factor
from training.signals import Signals
from training.text import refuse_ignored_options
from training.tracking import import_wandb
from training.validation import losses_apart, validation_loss


@command("train", TrainConfig)
def main(cfg: TrainConfig) -> float:
    world = join_world(cfg.device)
    try:
        with world.errors(), ExitStack() as cleanup:
            refuse_ignored_options(cfg.data, HydraConfig.get().overrides.task)
            loss = train(cfg, world, cleanup)
    except SystemExit:  # after a signal, which ends all processes
        world.close()
        raise
    except Diverged as error:  # in all processes
        if "direction" not in HydraConfig.get().sweeper:  # only a search continues after a diverged trial
            raise
        if world.main:
            print(f"error: {error}", flush=True)
        loss = float("inf")
    # After another error nothing is closed: nccl would wait for processes that are in a collective, before the error is said.
    world.close()
    return loss


def train(cfg: TrainConfig, world: World, cleanup: ExitStack) -> float:
    """Train as `cfg` says, until the last step or until a signal asks the process to end. All output is in the run folder.

    What must end with the run, whatever ends it, is entered into `cleanup`: a sweep trains the next run in this process.
    Returns the validation loss at the end, which a hyperparameter search minimises.
    """
    # ---------------------------------------- data
    signals = cleanup.enter_context(Signals(world))
    import_wandb(cfg.wandb)  # raises errors of wandb before anything is written
    tokenizer = open_tokenizer(cfg.data)
    T = cfg.model.context
    batch = sequences_per_step(cfg, world)
    source, val_windows = open_sources(cfg.data, tokenizer, T, cfg.model.document_mask)

    # ---------------------------------------- model
    cfg.model = fill_model(cfg.model, tokenizer)
    model = Decoder(cfg.model, seed=cfg.seed)
    model.recompute = cfg.activation_checkpointing
    dtype = pick_dtype(cfg.dtype, world.device)
    autocast = torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)
    compiled = compiles(cfg, model.flops_per_token()["total"], world)
    parallel = Parallel(model, world, cfg.parallel, cfg.shard_processes, compiled)
    micro_batch = cfg.micro_batch or micro_batch_that_fits(model, batch // world.size, autocast, world)
    loader = Prefetcher(Loader(source, batch, T, cfg.seed, world.rank, world.size, micro_batch))
    cleanup.enter_context(closing(loader))
    reads_model = world.main or parallel.sharded  # a sharded model needs all processes to read monitor and needles
    monitor = monitor_of(cfg.monitor, model, val_windows, world.device)
    needles = None
    if cfg.needle_every:
        needles = NeedleProbe(model, val_windows, tokenizer, cfg.needle_samples, cfg.data.retrieval.digits)

    # ---------------------------------------- optimizers
    check_warmup(cfg.steps, cfg.optim)
    optimizers = build_optimizers(model, cfg.optim, world)
    # The guard calls optimizer.step(). It skips the call if the loss or the gradient norm is not finite or an outlier.
    guard = Guard(optimizers, world, cfg.nonfinite, cfg.outlier_z)

    # ---------------------------------------- run folder: new, continued, or branched off another run
    run_dir = Path(cfg.run_dir or default_run_dir(cfg))
    first, lock = start_or_resume(cfg, run_dir, model, optimizers, guard, tokenizer, world)
    saver = Saver(run_dir, cfg.checkpoint, model, optimizers, world)
    if first == cfg.steps:
        signals.say(f"{run_dir}: already done, {first} steps")
        return last_val_loss(run_dir)
    run_facts = facts(model) | {"dtype": str(dtype).removeprefix("torch.")}  # dtype=auto depends on the processor
    log = None
    if world.main:
        lock.note(launcher())
        log = Metrics(run_dir, cfg.wandb, asdict(cfg), first)
        if first == 0:
            log.write(step=0, tokens=0, **run_facts, text_digest=text_digest(cfg.data))
        else:
            log.write(step=first, tokens=first * cfg.batch_tokens, continued={**origin(), "dtype": run_facts["dtype"]})
        for line in opening(cfg, run_dir, first, run_facts, world, compiled, micro_batch):
            signals.say(line)

    def record(step: int, **values: Any) -> None:
        """The main process writes a line of metrics.jsonl."""
        if log:
            log.write(step=step, tokens=step * cfg.batch_tokens, **values)

    # ---------------------------------------- loop
    peak = peak_flops(world.device)
    watch = Stopwatch(log.seconds_before if log else 0.0)  # training time only: paused in evaluation and saving
    step, last_logged_step, logged_seconds = first, first, watch.seconds
    if first == 0:
        model.set_step(0)  # so that the reading at step 0 shows the first value of a lambda with a warm-up

    while True:
        stopping, save_now = signals.agreed(step, cfg.log_every)
        last = step == cfg.steps
        fresh = step == 0 or step > first  # at the first step of a resumed run, the run before has evaluated and saved
        save_now |= last or (step > 0 and fresh and (due(step, cfg.checkpoint.every) or step in cfg.checkpoint.at))

        # skipped updates are read at steps where the loop waits for the device anyway
        if guard.ask_host or save_now or due(step, cfg.log_every):
            for skipped_step, reason in guard.read():
                samples = [(skipped_step - 1) * batch, skipped_step * batch - 1]
                record(skipped_step, skipped=reason, samples=samples)
                where = f"step {skipped_step}/{cfg.steps}"
                signals.say(f"{where} | update skipped: {reason} | samples {samples[0]} to {samples[1]}")

        # every eval_every steps: loss on the validation set (all processes take part)
        if last or (step and fresh and due(step, cfg.eval_every)):
            with watch.paused(), autocast:
                val_loss = validation_loss(model, val_windows, cfg.eval_tokens, micro_batch, world)
            if last:
                guard.refuse_bad_end(step, val_loss)
            record(step, val_loss=val_loss, time_s=round(watch.seconds, 2))
            signals.say(f"step {step}/{cfg.steps} | val loss {val_loss:.4f}")

        # every monitor.every steps: lambda, gates and entropies of a few layers
        if reads_model and monitor and fresh and (last or due(step, cfg.monitor.every)):
            with watch.paused():
                readings = monitor.read()
            record(step, **readings)

        # every needle_every steps: share of needle questions that the model answers
        if reads_model and needles and fresh and (last or due(step, cfg.needle_every)):
            with watch.paused():
                accuracy = needles.read()
            record(step, needle_acc=accuracy)

        # every checkpoint.every steps, and when a signal asks for it: a checkpoint
        if save_now and (fresh or not checkpoint.of_step(run_dir, step).exists()):
            with watch.paused():
                saver.save(step, guard.state())
        if last or stopping:
            break

        # one training step: micro batches, gradient clipping, optimizers
        lr = set_lr(optimizers, lr_factor(step, cfg.steps, cfg.optim))
        model.set_step(step)
        torch.manual_seed(hash_seed(cfg.seed, step, world.rank) >> 1)  # for dropout; so no RNG state is saved
        loss = torch.zeros((), device=world.device)
        for micro in range(loader.micros):
            inputs, targets = world.tensors(*inputs_and_targets(loader(step, micro)))  # (b, T) each
            with parallel.micro_batch(last=micro == loader.micros - 1):
                with autocast:
                    micro_loss = parallel.net(inputs, targets) / loader.micros
                micro_loss.backward()
            loss += micro_loss.detach()
        norm = parallel.clip_grad_norm(cfg.optim.clip)
        log_now, losses_by_kind = due(step + 1, cfg.log_every) or step + 1 in (1, cfg.steps), {}
        if log_now and isinstance(source, Mixture):  # losses of text and retrieval documents, before the weights change
            with watch.paused(), autocast:
                losses_by_kind = losses_apart(model, inputs, targets, source, loader.samples(step, micro), world)
        step += 1
        loss = world.mean(loss)
        guard.update(step, loss, norm)

        # every log_every steps: one line in metrics.jsonl and in the terminal
        if log_now:
            mean_loss = loss.item()  # waits for the device, so the time before it is that of finished steps
            speed = (step - last_logged_step) * cfg.batch_tokens / (watch.seconds - logged_seconds)
            last_logged_step, logged_seconds = step, watch.seconds
            line = {
                "loss": mean_loss,
                **losses_by_kind,
                "lr": lr,
                "grad_norm": norm.item(),
                "tokens_per_s": round(speed, 1),
                "mfu": speed * run_facts["flops_per_token"] / (peak * world.size) if peak else None,
                "mem_gb": memory_gb(world.device),
                "time_s": round(logged_seconds, 2),
            }
            record(step, **line)
            signals.say(log_line(step, cfg.steps, line, (cfg.steps - step) * cfg.batch_tokens / speed))

    saver.finish()
    if log:
        log.close()
    after = f"after step {step} and {clock(watch.seconds)} of training"
    if last:
        signals.say(f"{run_dir}: done {after}")
    else:
        name = signal.Signals(stopping).name
        signals.say(f"{run_dir}: stopped by {name} {after}; to continue, repeat the command with resume=true")
        signals.leave(stopping)  # ends the process
    return val_loss


def opening(
    cfg: TrainConfig, run_dir: Path, first: int, run_facts: dict, world: World, compiled: bool, micro_batch: int
) -> Iterator[str]:
    """The lines that a run prints before its first step: notes on its settings, then its size and how it computes."""
    if first == 0 and cfg.resume and not checkpoint.checkpoints(run_dir):
        yield f"note: no checkpoint in {run_dir}, so a new run starts"
    if run_facts["dtype"] == "bfloat16" and slow_bfloat16(world.device):
        yield "note: this processor cannot multiply bfloat16, which makes training about ten times slower: use dtype=auto"
    if cfg.optim.warmup >= cfg.steps:
        yield f"note: the run ends within its {cfg.optim.warmup} steps of warm-up: to reach lr, lower optim.warmup"
    yield (
        f"{run_dir}: {f'continues at step {first}' if first else 'new run'}, "
        f"{run_facts['params_non_embedding'] / 1e6:.2f}M parameters without embeddings "
        f"({run_facts['params'] / 1e6:.2f}M with), d_ff {cfg.model.d_ff}, {run_facts['flops_per_token'] / 1e6:.1f} MFLOPs per "
        f"token ({run_facts['attention_flops_per_token'] / 1e6:.1f} attention), {world.device.type} x {world.size}, "
        f"{run_facts['dtype']}{', compiled' if compiled else ''}, micro batch {micro_batch}"
    )


def due(step: int, every: int) -> bool:
    """Whether work that is done at every `every`-th step (0: never) is done at `step`."""
    return every > 0 and step % every == 0


def sequences_per_step(cfg: TrainConfig, world: World) -> int:
    """Global batch in sequences. ValueError if batch_tokens is not a multiple of context x processes."""
    T = cfg.model.context
    if cfg.batch_tokens % (T * world.size):
        step = T * world.size
        near = max(1, round(cfg.batch_tokens / step)) * step
        wrong = f"batch_tokens={cfg.batch_tokens} is not a multiple of context {T} x {world.size} processes"
        raise ValueError(f"{wrong}: use batch_tokens={near}")
    return cfg.batch_tokens // T


if __name__ == "__main__":
    main()
