"""What a replica imports, imported once: the fork server loads this, so that a replica starts quickly."""

import obstore
import torch
import torchft.local_sgd
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import earnest.diloco.worker
import earnest.runs.loop

torch.set_num_threads(1)
LOADED = (obstore, torchft, LlamaForCausalLM, PreTrainedTokenizerFast, earnest)
