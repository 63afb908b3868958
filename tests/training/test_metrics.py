"""What a run reports of itself, on machines that lack a part of it."""

from pathlib import Path

import pytest
import torch

from training import metrics


def test_memory_is_that_of_this_process_and_stands_in_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1200.0, "mfu": None}
    for content, gb, says in (("VmHWM:\t 2000000 kB\n", 2.048, "mem 2.05 GB"), ("VmSize:\t 9 kB\n", None, "mem n/a")):
        (tmp_path / "status").write_text(content)
        monkeypatch.setattr(metrics, "STATUS", tmp_path / "status")
        assert metrics.memory_gb(torch.device("cpu")) == gb
        assert says in metrics.log_line(1, 10, 512, line | {"mem_gb": gb})


def test_a_peak_belongs_to_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12), ("NVIDIA GeForce RTX 4090", 165e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A1000", None), ("NVIDIA GB200", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert metrics.peak_flops(torch.device("cuda")) == peak, name
    assert metrics.peak_flops(torch.device("cpu")) is None
