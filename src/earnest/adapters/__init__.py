"""Adapters: exact at birth, fp32 offsets from the base, readable by everybody. See `variant.py` for the contract."""

from earnest.adapters.adapter import Adapter as Adapter
from earnest.adapters.adapter import rows as rows
from earnest.adapters.attach import attach as attach
from earnest.adapters.errors import AdapterError as AdapterError
from earnest.adapters.files import load_adapter as load_adapter
from earnest.adapters.variant import VARIANTS as VARIANTS
from earnest.adapters.variant import Variant as Variant
from earnest.adapters.variant import get_variant as get_variant
from earnest.adapters.variant import list_variants as list_variants
from earnest.adapters.variant import register as register
from earnest.adapters.variants.lora import LoRA as LoRA
