from torch import Tensor

from .base import Attention, Carry, mean_and_spread


class TemperatureAttention(Attention):
    """softmax(Q K' / (t sqrt d)) V with one learned temperature t = exp(log_temperature) per head, 1 at the start."""

    name = "temperature"
    per_head = {"log_temperature": 0.0}
    colours = {"temperature": "#999933"}

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        sharpness = (-self.log_temperature).exp()[:, None, None]  # (H, 1, 1)
        return (q * sharpness).to(q.dtype), k, v

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("temperature", self.log_temperature.exp())
