"""Train a decoder: python train.py model=diff size=micro data=stdlib, or torchrun --nproc_per_node=8 train.py ..."""
# The code below reads from top to bottom in the order in which it runs: data, model, optimizers, run folder, training loop.

import signal
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from training.metrics import Metrics, Pace, Stopwatch, clock, last_val_loss, log_line, memory_gb, peak_flops
from training.monitor import monitor_of
from training.needle import NeedleProbe
from training.optim import build_optimizers, set_lr
from training.parallel import Parallel
from training.run import TrainConfig, compiles, default_run_dir, facts, fill_model, launcher, origin, start_or_resume
from training.saver import Saver
from training.schedule import check_warmup, lr_factor
from training.signals import Interrupted, Signals
from training.text import refuse_ignored_options
from training.tracking import import_wandb
from training.validation import losses_apart, validation_loss


@command("train", TrainConfig)
def main(cfg: TrainConfig) -> float:
    world = join_world(cfg.device)
    try:
        with world.errors(), ExitStack() as ends:
            refuse_ignored_options(cfg.data, HydraConfig.get().overrides.task)
            loss = train(cfg, world, ends)
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


def train(cfg: TrainConfig, world: World, ends: ExitStack) -> float:
    """Train as `cfg` says, until the last step or until a signal asks the process to end. All output is in the run folder.

    What must end with the run, whatever ends it, is entered into `ends`: a sweep trains the next run in this process.
    Returns the validation loss at the end, which a hyperparameter search minimises.
    """
    # ---------------------------------------- data
    signals = ends.enter_context(Signals(world))
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
    ends.enter_context(closing(loader))
    probing = world.main or parallel.sharded  # a sharded model needs all processes to read monitor and needles
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
    if world.largest(first) != first:
        wrong = f"{run_dir}: this process resumes at step {first}, but another process resumes at a later step"
        raise ValueError(f"{wrong}: put run_dir on a file system that all processes share")
    saver = Saver(run_dir, cfg.checkpoint, model, optimizers, world)
    if first == cfg.steps:
        signals.say(f"{run_dir}: already done, {first} steps")
        signals.end_sweep()
        return last_val_loss(run_dir)
    about = facts(model) | {"dtype": str(dtype).removeprefix("torch.")}  # dtype=auto depends on the processor
    log = None
    if world.main:
        lock.note(launcher())
        log = Metrics(run_dir, cfg.wandb, asdict(cfg), first)
        if first == 0:
            log.write(step=0, tokens=0, **about, text_digest=text_digest(cfg.data))
        else:
            log.write(step=first, tokens=first * cfg.batch_tokens, continued={**origin(), "dtype": about["dtype"]})
        if first == 0 and cfg.resume and not checkpoint.checkpoints(run_dir):
            signals.say(f"note: no checkpoint in {run_dir}, so a new run starts")
        if dtype == torch.bfloat16 and slow_bfloat16(world.device):
            signals.say(
                "note: this processor cannot multiply bfloat16, which makes training about ten times slower: use dtype=auto"
            )
        if cfg.optim.warmup >= cfg.steps:
            signals.say(f"note: the run ends within its {cfg.optim.warmup} steps of warm-up: to reach lr, lower optim.warmup")
        begins = f"continues at step {first}" if first else "new run"
        signals.say(
            f"{run_dir}: {begins}, {about['params_non_embedding'] / 1e6:.2f}M parameters without embeddings "
            f"({about['params'] / 1e6:.2f}M with), d_ff {cfg.model.d_ff}, {about['flops_per_token'] / 1e6:.1f} MFLOPs per "
            f"token ({about['attention_flops_per_token'] / 1e6:.1f} attention), {world.device.type} x {world.size}, "
            f"{about['dtype']}{', compiled' if compiled else ''}, micro batch {micro_batch}"
        )

    def record(step: int, **values: Any) -> None:
        """The main process writes a line of metrics.jsonl."""
        if log:
            log.write(step=step, tokens=step * cfg.batch_tokens, **values)

    # ---------------------------------------- loop
    peak = peak_flops(world.device)
    watch = Stopwatch(log.seconds_before if log else 0.0)  # training time only: paused in evaluation and saving
    pace = Pace(world.device)
    step, logged, seconds = first, first, watch.seconds
    done = first or None  # last step that was evaluated and saved: in a resumed run its first step
    if first == 0:
        model.set_step(0)  # so that the reading at step 0 shows the first value of a lambda with a warm-up

    while True:
        stopping, saving = signals.agreed(step, cfg.log_every)
        last, fresh = step == cfg.steps, step != done  # fresh: not evaluated and saved at this step before
        saving |= last or (step > 0 and fresh and (due(step, cfg.checkpoint.every) or step in cfg.checkpoint.at))

        # skipped updates are read at steps where the loop waits for the device anyway
        if guard.ask_host or saving or due(step, cfg.log_every):
            for at, why in guard.read():
                samples = [(at - 1) * batch, at * batch - 1]
                record(at, skipped=why, samples=samples)
                signals.say(f"step {at}/{cfg.steps} | update skipped: {why} | samples {samples[0]} to {samples[1]}")

        # every eval_every steps: loss on the validation set (all processes take part)
        if last or (step and fresh and due(step, cfg.eval_every)):
            with watch.paused(), signals.paused(), autocast:
                val_loss = validation_loss(model, val_windows, cfg.eval_tokens, micro_batch, world)
            if last:
                guard.refuse_bad_end(step, val_loss)
            record(step, val_loss=val_loss, time_s=round(watch.seconds, 2))
            signals.say(f"step {step}/{cfg.steps} | val loss {val_loss:.4f}")

        # every monitor.every steps: lambda, gates and entropies of a few layers
        if probing and monitor and fresh and (last or due(step, cfg.monitor.every)):
            with watch.paused(), signals.paused():
                readings = monitor.read()
            record(step, **readings)

        # every needle_every steps: share of needle questions that the model answers
        if probing and needles and fresh and (last or due(step, cfg.needle_every)):
            with watch.paused(), signals.paused():
                found = needles.read()
            record(step, needle_acc=found)

        # every checkpoint.every steps, and when a signal asks for it: a checkpoint
        if saving and (fresh or not checkpoint.of_step(run_dir, step).exists()):
            with watch.paused(), signals.paused():
                saver.save(step, guard.state())
        done = step
        if last or stopping:
            break

        # one training step: micro batches, gradient clipping, optimizers
        lr = set_lr(optimizers, lr_factor(step, cfg.steps, cfg.optim))
        model.set_step(step)
        torch.manual_seed(hash_seed(cfg.seed, step, world.rank) >> 1)  # for dropout; so no RNG state is saved
        loss = torch.zeros((), device=world.device)
        try:
            for micro in range(loader.micros):
                rows = signals.wait_for(loader, step, micro)  # (b, T + 1)
                inputs, targets = world.tensors(*inputs_and_targets(rows))  # (b, T) each
                with parallel.micro_batch(last=micro == loader.micros - 1):
                    with autocast:
                        part = parallel.net(inputs, targets) / loader.micros
                    part.backward()
                loss += part.detach()
        except Interrupted:  # a signal came while the loop waited for the loader: skip this step
            model.set_step(max(step - 1, 0))  # a checkpoint has the values of the last step that was taken
            continue
        norm = parallel.clip_grad_norm(cfg.optim.clip)
        logging, apart = due(step + 1, cfg.log_every) or step + 1 in (1, cfg.steps), {}
        if logging and isinstance(source, Mixture):  # losses of text and retrieval documents, before the weights change
            with watch.paused(), autocast:
                apart = losses_apart(model, inputs, targets, source, loader.samples(step, micro), world)
        step += 1
        loss = world.mean(loss)
        guard.update(step, loss, norm)

        # every log_every steps: one line in metrics.jsonl and in the terminal
        if logging:
            mean_loss = loss.item()  # waits for the device, so the time before it is that of finished steps
            speed = (step - logged) * cfg.batch_tokens / (watch.seconds - seconds)
            logged, seconds = step, watch.seconds
            line = {
                "loss": mean_loss,
                **apart,
                "lr": lr,
                "grad_norm": norm.item(),
                "tokens_per_s": round(speed, 1),
                "mfu": speed * about["flops_per_token"] / (peak * world.size) if peak else None,
                "mem_gb": memory_gb(world.device),
                "time_s": round(seconds, 2),
            }
            record(step, **line)
            signals.say(log_line(step, cfg.steps, line, (cfg.steps - step) * cfg.batch_tokens / speed))
            if collapsed := pace.warning(speed):
                signals.say(collapsed)

    with signals.paused():
        saver.finish()
        if log:
            log.close()
    name = signal.Signals(stopping).name if stopping else ""
    how, then = ("done", "") if last else (f"stopped by {name}", "; to continue, repeat the command with resume=true")
    signals.say(f"{run_dir}: {how} after step {step} and {clock(watch.seconds)} of training{then}")
    if not last:
        signals.leave(stopping)  # ends the process
    signals.end_sweep()
    return val_loss


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
