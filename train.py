"""Train a decoder: python train.py model=diff size=micro data=stdlib, or torchrun --nproc_per_node=8 train.py ..."""
# The code below reads from top to bottom in the order in which it runs: data, model, optimizers, run folder, training loop.

import os
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

# torch loads libgomp, which reads GOMP_SPINCOUNT: beside busy processes, waiting threads should sleep sooner
# (docs/PERFORMANCE.md). The fourth field of /proc/loadavg is RUNNABLE/ALL threads; at 1/ALL only this process runs.
if "OMP_WAIT_POLICY" not in os.environ and os.path.exists("/proc/loadavg"):
    samples = [Path("/proc/loadavg").read_text().split()[3] for _ in range(5) if not time.sleep(0.02)]
    if not any(threads.startswith("1/") for threads in samples):
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
from hydra.core.hydra_config import HydraConfig

from configs import command
from data.loader import Loader, Mixture, Prefetcher, hash_seed, inputs_and_targets
from data.stream import open_sources, open_tokenizer
from model.decoder import Decoder
from training.distributed import World, join_world
from training.metrics import Stopwatch, log_line, val_losses
from training.monitor import NeedleProbe, losses_by_kind, monitor_of, validation_loss
from training.optim import Diverged, Guard, build_optimizers, set_lr
from training.parallel import Parallel, compiles, default_micro_batch
from training.run import Run, TrainConfig, check_config, fill_model, take_architecture
from training.signals import Signals


@command("train", TrainConfig)
def main(cfg: TrainConfig) -> float:
    world = join_world(cfg.device)
    try:
        with world.errors(), ExitStack() as cleanup:
            take_architecture(cfg, HydraConfig.get().overrides.task)
            check_config(cfg, world, HydraConfig.get().overrides.task)
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
    # After another error nothing is closed: nccl would wait for processes that are in a collective.
    world.close()
    return loss


def train(cfg: TrainConfig, world: World, cleanup: ExitStack) -> float:
    """Train as `cfg` says, until the last step or until a signal asks the process to end. All output is in the run folder.

    `cleanup` gets all that must be closed when the run ends or fails, because a sweep trains its next run in this process.
    Returns the validation loss at the end, which a hyperparameter search minimises.
    """
    # ---------------------------------------- data: sequences of T + 1 tokens, `batch` of them per step over all processes
    signals = cleanup.enter_context(Signals(world))
    tokenizer = open_tokenizer(cfg.data)
    T, batch = cfg.model.context, cfg.batch_tokens // cfg.model.context
    source, val_windows = open_sources(cfg.data, tokenizer, T, cfg.model.document_mask)

    # ---------------------------------------- model
    cfg.model = fill_model(cfg.model, tokenizer)
    model = Decoder(cfg.model, seed=cfg.seed)
    model.gradient_checkpointing = cfg.activation_checkpointing
    autocast = world.autocast(cfg.dtype)
    flops_per_token = model.flops_per_token()["total"]
    compiled = compiles(cfg.compile, flops_per_token * cfg.steps * cfg.batch_tokens, world)
    parallel = Parallel(model, world, cfg.parallel, cfg.shard_processes, compiled)
    micro_batch = cfg.micro_batch or default_micro_batch(batch // world.size, T, world)
    loader = cleanup.enter_context(closing(Prefetcher(Loader(source, batch, cfg.seed, world.rank, world.size, micro_batch))))

    # What reads the model while it trains. All processes must take part in the forward passes of a sharded model.
    reads_model = world.main or parallel.sharded
    monitor = monitor_of(cfg.monitor, model, val_windows, world.device)
    needles = None
    if cfg.needle_every:
        needles = NeedleProbe(model, val_windows, tokenizer, cfg.needle_samples, cfg.data.retrieval.digits)

    # ---------------------------------------- optimizers
    optimizers = build_optimizers(model, cfg.optim, world)
    guard = Guard(optimizers, world, cfg.nonfinite)

    # ---------------------------------------- run folder: new, continued, or branched off another run
    run = Run(cfg, model, optimizers, guard, tokenizer, world)
    if run.first == cfg.steps:
        signals.say(f"{run.folder}: already done, {run.first} steps")
        return val_losses(run.folder)[-1]
    cleanup.push(run)  # also deletes the folder of a new run whose first line cannot be written
    run.open_log()
    signals.say(run.opening(compiled, micro_batch))

    # ---------------------------------------- loop: each turn first measures and saves the model after `step` steps, then
    # trains one more step, except in the last turn. A measurement comes before the checkpoint of the same step, so that a run
    # that is resumed from this checkpoint does not repeat the measurement.
    step = run.first
    # Training time only: paused while the model is read and saved.
    watch = Stopwatch(run.log.seconds_before if run.log else 0.0, step)
    if step == 0:
        model.set_step(0)  # so that the reading at step 0 shows the first value of a lambda with a warm-up

    while True:
        stopped_by, save_now = signals.agreed(step, cfg.log_every)  # a signal's number, or 0
        last = step == cfg.steps
        unread = step == 0 or step > run.first  # a resumed run has the readings of its first step already

        # skipped updates are read at steps where the loop waits for the device anyway
        save_now |= last or (step > run.first and (due(step, cfg.checkpoint.every) or step in cfg.checkpoint.at))
        if guard.ask_host or save_now or due(step, cfg.log_every):
            for skipped_step, reason in guard.skipped_updates():
                samples = [(skipped_step - 1) * batch, skipped_step * batch - 1]
                run.record(skipped_step, skipped=reason, samples=samples)
                where = f"step {skipped_step}/{cfg.steps}"
                signals.say(f"{where} | update skipped: {reason} | samples {samples[0]} to {samples[1]}")

        # every eval_every steps: loss on the validation set (all processes take part)
        if last or (step and unread and due(step, cfg.eval_every)):
            with watch.paused(), autocast:
                val_loss = validation_loss(model, val_windows, cfg.eval_tokens, micro_batch, world)
            if last:
                guard.refuse_bad_end(step, val_loss)
            run.record(step, val_loss=val_loss, time_s=round(watch.seconds, 2))
            signals.say(f"step {step}/{cfg.steps} | val loss {val_loss:.4f}")

        # every monitor.every steps: lambda, gates and entropies of a few layers
        if reads_model and monitor and unread and (last or due(step, cfg.monitor.every)):
            with watch.paused():
                readings = monitor.read()
            run.record(step, **readings)

        # every needle_every steps: share of needle questions that the model answers
        if reads_model and needles and unread and (last or due(step, cfg.needle_every)):
            with watch.paused():
                accuracy = needles.read()
            run.record(step, needle_acc=accuracy)

        # every checkpoint.every steps, and when a signal asks for it: a checkpoint
        if save_now:
            with watch.paused():
                run.save(step)
        if last or stopped_by:
            break

        # one training step: forward and backward passes of micro batches, whose gradients add up
        lr = set_lr(optimizers, step, cfg.steps, cfg.optim)
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
        loss = world.mean(loss)
        norm = parallel.clip_grad_norm(cfg.optim.clip)

        # where the step is logged: losses of text and retrieval documents in its last micro batch, before the weights change
        logs_step, by_kind = due(step + 1, cfg.log_every) or step + 1 in (1, cfg.steps), {}
        if logs_step and isinstance(source, Mixture):
            with watch.paused(), autocast:
                by_kind = losses_by_kind(model, inputs, targets, source, loader.samples(step, micro), world)

        # the update: optimizer.step(), unless the loss or the gradient norm is not finite
        step += 1
        guard.step_optimizers(step, loss, norm)

        # every log_every steps: one line in metrics.jsonl and in the terminal
        if logs_step:
            line = {"loss": loss.item(), **by_kind, "lr": lr, "grad_norm": norm.item()}  # waits for the device
            line |= watch.reading(step, cfg.batch_tokens, flops_per_token, world)
            run.record(step, **line)
            signals.say(log_line(step, cfg.steps, cfg.batch_tokens, line))

    # ---------------------------------------- end
    run.finish()
    if stopped_by and not last:
        signals.say(
            f"{run.folder}: stopped by {signal.Signals(stopped_by).name} after step {step} and {watch} of training; "
            "to continue, repeat the command with resume=true"
        )
        signals.leave(stopped_by)  # ends the process
    signals.say(f"{run.folder}: done after step {step} and {watch} of training")
    return val_loss


def due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; False where `every` is 0."""
    return every > 0 and step % every == 0


if __name__ == "__main__":
    main()
