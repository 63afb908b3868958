"""docs/modules.md runs."""

import importlib.util
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.conftest import ROOT


def test_the_blocks_of_the_page_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With model/ as the package that an installation makes of it."""
    where = [str(ROOT / "model")]
    spec = importlib.util.spec_from_file_location(
        "attention_noise", ROOT / "model" / "__init__.py", submodule_search_locations=where
    )
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attention_noise", package)
    spec.loader.exec_module(package)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "modules.md").read_text(), flags=re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 9 and names["patches"].shape == (2, 197, 192) and names["y"].shape == (2, 10, 512)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        module, other = (package.IntrospectiveAttention(d_model=64, n_head=4) for _ in range(2))
        with pytest.raises(ValueError, match="scalar"):
            fully_shard(other, mesh=mesh)
        names["shard"](module, mesh)(torch.randn(2, 5, 64)).sum().backward()
        assert module.alpha.grad is not None and module.alpha.shape == ()
    finally:
        dist.destroy_process_group()
    for name in [name for name in sys.modules if name.startswith("attention_noise.")]:
        monkeypatch.delitem(sys.modules, name)
