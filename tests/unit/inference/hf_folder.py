"""Folders as they are downloaded: a small random model in Hugging Face format with its tokenizer beside it."""

import torch

from megatron.conversion.convert import to_checkpoint
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.core.models.hf.source import HFSource
from tests.unit.inference.serving import write_tokenizer
from tests.unit.models.hf_models import make_hf_model

EOD = 257  # of the tokenizer
TEXTS = ["def f(", "The quick brown fox", "a"]
FIELDS = {"num_hidden_layers": 2, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": EOD}


def write_folder(folder, name="llama", dtype=torch.float32, ends=()):
    """The model of transformers. Its folder says that tokens `ends` end an answer, as the tokenizer's eos does."""
    # As many ids as the tokenizer has, so that transformers chooses no other; beside a Qwen it gets one more.
    model = make_hf_model(name, dtype, vocab_size=261 if name.startswith("qwen") else 260, **FIELDS)
    model.generation_config.eos_token_id = [EOD, *ends]
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def convert(folder, root, dtype=torch.float32):
    """The checkpoint that tools/checkpoint/convert.py makes of it; its folder."""
    to_checkpoint(HFSource(folder), root, dtype=dtype, tokenizer=tokenizer_of(folder))
    return str(root)


def greedy(model, ids, new, **options):
    """What transformers continues a prompt with."""
    found = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    return found[0, len(ids) :].tolist()
