"""lm-eval's own command line, with our runs as the model `attention_noise`; all other options are lm-eval's.

    python -m eval.lm_eval_plugin run --model attention_noise --model_args run=runs/NAME --tasks hellaswag

lm-eval 0.4.13 knows only the models in its own table, so this module adds ours to the table and then starts lm-eval.
Later versions import plugins themselves: PYTHONPATH=. lm_eval run --plugins eval.lm_eval_plugin --model attention_noise
...
"""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from eval.common import open_run
from eval.harness import HarnessConfig, RunLM


@register_model("attention_noise")
class NamedRunLM(RunLM):
    """A run as a model that lm-eval makes from --model_args, --batch_size and --device.

    run: folder of the run. length: tokens that the model reads at once; None: the trained context. batch_size=auto is
    32.
    """

    def __init__(
        self, run: str, batch_size: int | str = 32, device: str = "auto", length: int | None = None, **_: object
    ) -> None:
        batch = int(batch_size) if str(batch_size).isdecimal() else 32
        super().__init__(open_run(HarnessConfig(run=run, tasks=[], device=device)), batch, length)


if __name__ == "__main__":
    cli_evaluate()
