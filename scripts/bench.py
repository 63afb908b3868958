"""Measure speed: python scripts/bench.py what=NAME [out=runs/bench/NAME.json], where NAME is one of

    attention   a variant's attention on a backend: the attention product alone ("op", with its memory) and the whole module
    train       whole training steps of configs/model at size=micro; with peer=FOLDER the gpt2 stack against a nanoGPT checkout
    decode      decoding of one token, with and without a cache
    loader      batches from shards in the page cache, and how long a training step waits for the next batch
    tokenizer   text to ids on one thread: tiktoken alone, our tokenizer, and the whole of data.prepare

After a warm-up, every round times all rows in turn (A B C A B C ...), so that a slow period of the machine affects all rows
alike. A cell of the table has the median over rounds, the least and the most in brackets, and the median of the rounds' ratios
to the first row of the same group that could be measured (a group: one length or tokenizer, else the whole table). "Forward"
runs without gradients. A row that cannot run on this machine says why.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.attention import attention
from bench.data import loader, tokenizer
from bench.decoding import decode
from bench.models import BenchConfig
from bench.timing import table
from bench.training import train
from configs import command
from configs.files import write_atomic, write_json
from configs.provenance import machine, version
from eval.common import model_files
from model.attention.backends import BACKENDS
from training.distributed import join_world, pick_dtype

BENCHES = {work.__name__: work for work in (attention, train, loader, tokenizer, decode)}


@command("bench", BenchConfig)
def main(cfg: BenchConfig) -> None:
    for key, given, allowed in (
        ("what", [cfg.what], BENCHES),
        ("variants", cfg.variants or [], model_files()),
        ("backends", cfg.backends or [], BACKENDS),
    ):
        if unknown := [name for name in given if name not in allowed]:
            raise ValueError(f"{key} has no '{unknown[0]}': use {', '.join(allowed)}")
    if cfg.what == "decode" and cfg.dtype == "auto":
        cfg.dtype = "float32"
    world, load = join_world(cfg.device), os.getloadavg()[0]
    rows = BENCHES[cfg.what](cfg, world)
    if not any(row.seconds for row in rows):
        reasons = [reason for row in rows for reason in row.not_measured.values()]
        raise ValueError(f"nothing could be measured: {[*reasons, 'none of variants= can use one of backends='][0]}")
    where = machine() | {"load": round(load, 2), "dtype": str(pick_dtype(cfg.dtype, world.device))}
    content = {"bench": cfg.what, "config": asdict(cfg), "machine": where, "version": version()}
    path = Path(cfg.out or f"runs/bench/{cfg.what}.json")
    write_json(path, content | {"results": {"rows": list(map(asdict, rows))}})
    machine_line = f"{where['cpu']}, GPU {where['gpu']}, {where['threads']} threads, {where['dtype']}, load {where['load']}"
    text = f"{table(rows)}\n\nn = {cfg.rounds} rounds; {machine_line} at the start; {content['version']}\n"
    write_atomic(path.with_suffix(".md"), text.encode())
    print(f"{text}{path}")


if __name__ == "__main__":
    main()
