"""Join a sharded checkpoint into whole safetensors files: python scripts/consolidate.py run=runs/NAME

Training with checkpoint.sharded=true writes sharded checkpoints. This command rewrites the checkpoint's folder as
training without that option writes it: weights in model.safetensors, optimizer state in optimizer.safetensors. It needs
one process with memory for both. Evaluations and a resumed training read both forms; other tools read only the joined
form.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from omegaconf import MISSING

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import command
from configs.files import FolderLock, read_run_config, remove_leftovers
from model.config import decoder_config, from_dict
from model.decoder import Decoder
from training import checkpoint, sharded
from training.optim import OptimConfig, build_optimizers, state_tensors


@dataclass
class ConsolidateConfig:
    """The checkpoint to join."""

    run: str = MISSING  # folder of the run
    step: Annotated[int | None, "[0, inf)"] = None  # step of the checkpoint; None: the newest


@command("consolidate", ConsolidateConfig)
def main(cfg: ConsolidateConfig) -> None:
    run = Path(cfg.run)
    found = [f for f in checkpoint.checkpoints(run) if cfg.step is None or f.name == checkpoint.folder_name(cfg.step)]
    if not found:
        raise ValueError(f"{run} has no such checkpoint: give run=runs/NAME, and a step= that is in the run's checkpoints/")
    folder = found[-1]
    if not sharded.shards(folder):
        print(f"{folder} is not sharded: there is nothing to join")
        return
    lock = FolderLock(run, "trains in it")  # a training could delete the checkpoint meanwhile
    remove_leftovers(run / "checkpoints")
    state = checkpoint.read_state(folder)
    model = Decoder(decoder_config(state["model"]))
    optimizers = build_optimizers(model, from_dict(OptimConfig, read_run_config(run, groups=("optim",))["optim"], "optim"))
    checkpoint.load(folder, model, optimizers)
    checkpoint.write(folder, checkpoint.own_weights(model), state_tensors(optimizers), state)
    lock.release()
    print(f"{folder}: joined")


if __name__ == "__main__":
    main()
