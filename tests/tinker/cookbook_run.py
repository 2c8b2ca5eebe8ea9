"""Run in .venv-cookbook: register nano's tokenizer with the cookbook, then start one of its recipes as it is.

python cookbook_run.py NANO_FOLDER tinker_cookbook.recipes.chat_sl.train key=value …
"""

import runpy
import sys

from tinker_cookbook.tokenizer_utils import register_tokenizer


def nano():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


FOLDER, RECIPE, *WORDS = sys.argv[1:]
register_tokenizer("earnest/nano", nano)
sys.argv = [RECIPE, *WORDS]
runpy.run_module(RECIPE, run_name="__main__")
