"""Adapters: bit-exact at initialization, fp32 offsets from the base, saved in PEFT's format. Contract: `variant.py`."""

from earnest.adapters.adapter import Adapter as Adapter
from earnest.adapters.adapter import rows as rows
from earnest.adapters.adapter import without_adapters as without_adapters
from earnest.adapters.attach import attach as attach
from earnest.adapters.errors import AdapterError as AdapterError
from earnest.adapters.files import load_adapter as load_adapter
from earnest.adapters.variant import VARIANTS as VARIANTS
from earnest.adapters.variant import Variant as Variant
from earnest.adapters.variant import get_variant as get_variant
from earnest.adapters.variant import list_variants as list_variants
from earnest.adapters.variant import register as register
from earnest.adapters.variants.antipasto import AntiPaSTO as AntiPaSTO
from earnest.adapters.variants.delora import DeLoRA as DeLoRA
from earnest.adapters.variants.dora import DoRA as DoRA
from earnest.adapters.variants.eva import EVA as EVA
from earnest.adapters.variants.full import Full as Full
from earnest.adapters.variants.hra import HRA as HRA
from earnest.adapters.variants.ia3 import IA3 as IA3
from earnest.adapters.variants.ia3 import IA3FF as IA3FF
from earnest.adapters.variants.lora import LoRA as LoRA
from earnest.adapters.variants.oft import OFT as OFT
from earnest.adapters.variants.pissa import PiSSA as PiSSA
from earnest.adapters.variants.road import ROAD as ROAD
from earnest.adapters.variants.vera import VeRA as VeRA
