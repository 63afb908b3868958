"""One decoder, and attention modules that stand alone; installed as the package `attention_noise` (docs/modules.md)."""

from .attention import *  # VARIANTS and the class of each
from .attention.base import Attention, AttentionConfig
from .attention.mask import Mask
from .attention.probe import probe, visit_logits
from .cache import KVCache
from .config import DecoderConfig
from .decoder import Decoder
