"""Folders with weights in FP8 as publishers write them, made from a folder of transformers, and what they stand for."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(strategy, **changes):
    """The fields that llm-compressor writes; changes: of the weights."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **changes}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


# name -> (quantization_config, ending of the scales' names, rows and columns that share a scale (None: all), shape and
# dtype of the scales of a weight, endings of scales of activations)
SCHEMES = {
    "blocks": (BLOCKS, "_scale_inv", (128, 128), torch.float32, ()),
    "blocks, bf16 scales": ({**BLOCKS, "scale_fmt": None}, "_scale_inv", (128, 128), torch.bfloat16, ()),
    "per tensor, transformers": (
        {**BLOCKS, "weight_block_size": None},
        "_scale_inv",
        (None, None),
        torch.bfloat16,
        ("activation_scale",),
    ),
    "per tensor, vllm": (PER_TENSOR, "_scale", (None, None), torch.float32, ("input_scale",)),
    "compressed, tensor": (compressed("tensor"), "_scale", (None, None), torch.bfloat16, ("input_scale",)),
    "compressed, channel": (compressed("channel"), "_scale", (1, None), torch.bfloat16, ()),
    "compressed, block": (
        compressed("block", block_structure=[128, 128]),
        "_scale",
        (128, 128),
        torch.float32,
        (),
    ),
}


def e4m3_values():
    """The number of each byte, from the definition: sign, 4 bits of exponent with bias 7, 3 of mantissa, no
    infinity."""
    found = np.empty(256, np.float32)
    for byte in range(256):
        sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found[byte] = sign * (np.nan if byte & 127 == 127 else value)
    return found


def is_quantized(name):
    """Linear layers but for the head and routers, as in published models."""
    return name.endswith(
        ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "W_pack.weight", "gate_up_proj", "down_proj")
    )


def quantize_folder(folder, scheme, seed=3):
    """Replace the weights of a folder by FP8 ones; (the numbers that they stand for, in fp32, by name).

    The bytes are random, and so are the scales: each is another one.
    """
    config, ending, (rows, columns), dtype, activations = SCHEMES[scheme]
    generator, values, expected = np.random.default_rng(seed), e4m3_values(), {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(path).items():
            if not is_quantized(name):
                tensors[name], expected[name] = tensor, tensor.float().numpy()
                continue
            codes = (
                generator.integers(0, 127, tensor.shape, np.uint8)
                | generator.integers(0, 2, tensor.shape, np.uint8) << 7
            )
            *front, height, width = tensor.shape
            size = (rows or height, columns or width)
            shape = [*front, -(-height // size[0]), -(-width // size[1])]
            scale = torch.from_numpy(generator.uniform(1e-4, 2e-3, shape).astype(np.float32)).to(dtype)
            full = scale.float().numpy().repeat(size[0], -2).repeat(size[1], -1)[..., :height, :width]
            expected[name] = values[codes] * full
            tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            tensors[name + ending] = scale.reshape(()) if (rows, columns) == (None, None) else scale
            for activation in activations:
                tensors[f"{name.rpartition('.')[0]}.{activation}"] = torch.tensor(0.5)
        save_file(tensors, path, {"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        content = json.loads(index.read_text())
        places = {key: path.name for path in folder.glob("*.safetensors") for key in load_file(path)}
        index.write_text(json.dumps({**content, "weight_map": places}))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return expected
