"""Write a run's model as a folder that transformers loads: python scripts/export.py run=runs/NAME out=FOLDER

  python scripts/export.py run=runs/base out=exported/base               the model of transformers that computes the same
  python scripts/export.py run=runs/diff to=diffllama out=exported/diff  or llama, gpt2, ...: refused if it computes otherwise
  python scripts/export.py run=runs/v2 to=remote out=exported/v2         any variant, with our code (trust_remote_code=True)
  python scripts/export.py run=runs/converted to=axolotl out=axolotl/1   for axolotl with its plugin

The folder has config.json, model.safetensors (float32), the tokenizer as AutoTokenizer reads it, and README.md, the model's
card. Its logits and token ids are compared with the run's (to=axolotl: by our reader, logits alone).
push=user/name also uploads it to the Hugging Face hub, with the token of `hf auth login`; a new repository is private.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from omegaconf import MISSING
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import command
from configs.files import whole_folder, write_json
from data.tokenizer import SAMPLE, Tokenizer, import_optional
from data.tokenizer_export import export_tokenizer
from eval.model_card import model_card
from model.decoder import Decoder
from model.interop.huggingface import export, read_folder
from training.checkpoint import load_run, write_tensors

TOLERANCE = 1e-4  # as a share of the largest logit; float32 sums in another order differ by about 1e-6


@dataclass
class ExportConfig:
    """The run to export, and the format.

    to: diffllama | llama | gpt2 | mistral | qwen2 | qwen3 | olmo2 | phi3 | remote | axolotl; None: a model of
    transformers if one computes the same, else remote.
    """

    run: str = MISSING  # folder of the run
    out: str = MISSING  # a folder that does not exist yet
    to: str | None = None
    step: Annotated[int | None, "[0, inf)"] = None  # step of the checkpoint; None: the newest
    tokenizer: bool = True  # write the tokenizer's files, too
    check: bool = True  # load the folder and compare it with the run
    push: str | None = None  # user/name: upload to this repository of the hub; a missing repository is made, private


@torch.no_grad()
def compared(loaded: Callable[[Tensor], Tensor], model: Decoder) -> str:
    """How far the logits of `loaded` are from the run's. ValueError if float32 cannot explain the difference."""
    length = min(model.cfg.context, max(64, 2 * (model.cfg.window or 0)))  # past a window
    tokens = torch.randint(model.cfg.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    ours = model(tokens)
    apart = (loaded(tokens) - ours).abs().max().item()
    if not apart <= TOLERANCE * max(1.0, ours.abs().max().item()):
        raise ValueError(f"the exported model's logits differ from the run's by {apart:.1e}: export with to=remote")
    return f"logits differ from the run's by at most {apart:.1e} (float32, {tokens.numel()} random tokens)"


def from_transformers(folder: Path, tokenizer: Tokenizer | None) -> Callable[[Tensor], Tensor]:
    """The folder's function as transformers computes it. ValueError if its tokenizer gives other ids than `tokenizer`."""
    with tempfile.TemporaryDirectory() as modules:
        os.environ.setdefault("HF_MODULES_CACHE", modules)  # a temporary copy of the folder's code
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
        encode = AutoTokenizer.from_pretrained(folder, trust_remote_code=True) if tokenizer else None
    if encode and encode(SAMPLE)["input_ids"] != tokenizer.encode(SAMPLE):
        raise ValueError("the exported tokenizer gives other ids than the run's: export with tokenizer=false, and give ids")
    return lambda tokens: loaded(tokens).logits


def check(form: str, folder: Path, model: Decoder, tokenizer: Tokenizer | None) -> str:
    """A few words on how the folder compares with the run."""
    if form == "axolotl":
        cfg, state = read_folder(folder)
        loaded = Decoder(cfg).eval()
        loaded.load_state_dict(state, strict=True)
        return compared(loaded, model)
    try:
        return compared(from_transformers(folder, tokenizer), model)
    except ModuleNotFoundError:
        return "not compared: transformers is not installed (pip install transformers)"


def load_lines(form: str, place: str, tokenizer: bool) -> str:
    """Python lines that load the folder or repository `place`, and its tokenizer if it has one."""
    if form == "axolotl":
        return f"from model.interop.huggingface import read_folder\n\nconfig, state = read_folder({place!r})"
    trust = ", trust_remote_code=True" if form == "remote" else ""
    names = {"model": "AutoModelForCausalLM"} | ({"tokenizer": "AutoTokenizer"} if tokenizer else {})
    lines = [f"{name} = {kind}.from_pretrained({place!r}{trust})" for name, kind in names.items()]
    return "\n".join([f"from transformers import {', '.join(names.values())}", "", *lines])


def upload(folder: Path, repository: str) -> str:
    """Upload the folder to the hub; returns the address."""
    hub = import_optional("huggingface_hub", "push")
    try:
        api = hub.HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
    except Exception as error:  # the errors of the hub and of the http library have no common class
        # Only the class: the error's text may contain the request's headers and so the token.
        failed = f"{folder} is written, but the upload failed ({type(error).__name__})"
        raise ValueError(f"{failed}: type `hf auth login`, then `hf upload {repository} {folder}`") from None
    return f"https://huggingface.co/{repository}"


@command("export", ExportConfig)
def main(cfg: ExportConfig) -> None:
    out = Path(cfg.out)
    if out.exists():
        raise ValueError(f"{out} exists already: choose another out=FOLDER")
    run = load_run(cfg.run, step=cfg.step)
    exported = export(run.model, cfg.to, run.tokenizer.eot)
    form, tokenizer = exported.format, run.tokenizer if cfg.tokenizer else None
    with whole_folder(out) as partial:
        write_tensors(partial / "model.safetensors", exported.tensors, {"format": "pt"})
        write_json(partial / "config.json", exported.config)
        write_json(partial / "generation_config.json", dict.fromkeys(("bos_token_id", "eos_token_id"), run.tokenizer.eot))
        if tokenizer:
            export_tokenizer(tokenizer, partial, run.model.cfg.context)
        card = model_card(run, form, load_lines(form, cfg.push or out.name, cfg.tokenizer))
        for name, text in (exported.files | {"README.md": card}).items():
            (partial / name).write_text(text, encoding="utf-8")
        result = check(form, partial, run.model, tokenizer) if cfg.check else "not compared"
    print(f"{out}: {cfg.run} at step {run.step} as {form}; {result}")
    print(load_lines(form, cfg.out, cfg.tokenizer))
    if cfg.push:
        print(f"uploaded to {upload(out, cfg.push)}")


if __name__ == "__main__":
    main()
