"""Signatures of Transformer Engine 2.12.0, as its own source has them: without annotations, in Python's words.

Those of compiled functions are from the bindings in pybind.cpp and the declarations in extensions.h. A "/" ends
arguments without names there.
"""

import ast
import re

# "file:function" or "file:Class.method" -> arguments
PYTHON = {
    "cpp_extensions/gemm.py:general_gemm": (
        "A, B, out_dtype=None, quantization_params=None, gelu=False, gelu_in=None, alpha=1.0, beta=None, "
        "accumulate=False, layout='TN', out=None, bias=None, use_split_accumulator=False, grad=False, ub=None, "
        "ub_type=None, extra_output=None, bulk_overlap=False"
    ),
    "cpp_extensions/fused_attn.py:fused_attn_fwd": (
        "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
        "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
        "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, "
        "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
        "softmax_type='vanilla', window_size=(-1, -1), bottom_right_diagonal=None, rng_gen=None, softmax_offset=None, "
        "return_max_logit=False, cuda_graph=False"
    ),
    "cpp_extensions/fused_attn.py:fused_attn_bwd": (
        "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, "
        "aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
        "s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, "
        "qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', "
        "window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, cuda_graph=False"
    ),
    "quantized_tensor.py:Quantizer.set_usage": "self, *, rowwise=None, columnwise=None",
    "quantized_tensor.py:Quantizer.__call__": "self, tensor",
    "tensor/float8_tensor.py:Float8Quantizer.__init__": "self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True",
    "tensor/float8_tensor.py:Float8CurrentScalingQuantizer.__init__": (
        "self, fp8_dtype, device, *, rowwise=True, columnwise=True, use_existing_amax=False, "
        "with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0, scale=None, "
        "amax=None"
    ),
    "tensor/float8_blockwise_tensor.py:Float8BlockQuantizer.__init__": (
        "self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2"
    ),
    "tensor/mxfp8_tensor.py:MXFP8Quantizer.__init__": "self, fp8_dtype, *, rowwise=True, columnwise=True",
    "quantization.py:is_fp8_available": "return_reason=False",
    "quantization.py:is_fp8_block_scaling_available": "return_reason=False",
    "quantization.py:is_mxfp8_available": "return_reason=False",
}
COMPILED = {
    "rmsnorm_fwd": "input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma",
    "rmsnorm_bwd": "dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /",
    "rmsnorm_bwd_add": "dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma, /",
    "layernorm_fwd": "input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma",
    "layernorm_bwd": "dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma, /",
    **dict.fromkeys(("swiglu", "geglu", "gelu", "srelu"), "input, quantizer"),
    **dict.fromkeys(("dswiglu", "dgeglu", "dgelu", "dsrelu"), "grad, fwd_input, quantizer"),
    "get_fused_attn_backend": (
        "is_training, q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type, softmax_type, p_dropout, "
        "num_attn_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim_qk, head_dim_v, window_size_left, "
        "window_size_right, return_max_logit, cuda_graph, deterministic, /"
    ),
}
# Names that are looked up in dictionaries of constants.py and fused_attn.py.
KEYS = {
    "cpp_extensions/fused_attn.py:QKVLayout": ("sbhd_sbhd_sbhd", "thd_thd_thd"),
    "cpp_extensions/fused_attn.py:AttnBiasType": ("no_bias",),
    "cpp_extensions/fused_attn.py:AttnMaskType": ("causal", "padding_causal"),
    "cpp_extensions/fused_attn.py:SoftmaxType": ("vanilla",),
    "cpp_extensions/fused_attn.py:FusedAttnBackend": ("F16_max512_seqlen", "F16_arbitrary_seqlen", "No_Backend"),
}


def in_source(path, name):
    """The arguments of a function or of a method of a class in a Python file."""
    nodes = ast.parse(path.read_text()).body
    for part in name.split("."):
        (node,) = [each for each in nodes if getattr(each, "name", None) == part]
        nodes = getattr(node, "body", [])
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(node.args)


def keys_in_source(path, name):
    """The keys of a dictionary in a Python file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return [ast.literal_eval(key) for key in node.value.keys]
    raise AssertionError(name)


def in_bindings(csrc, name):
    """The arguments of a compiled function, from the bindings, or from its declaration if they have no names there."""
    bindings = (csrc / "extensions" / "pybind.cpp").read_text()
    call = re.search(rf'm\.def\("{name}",(.*?)\);\n', bindings, re.DOTALL).group(1)
    named = re.findall(r'py::arg\("(\w+)"\)', call)
    if named:
        return ", ".join(named)
    declaration = re.search(rf"\b{name}\((.*?)\);", (csrc / "extensions.h").read_text(), re.DOTALL).group(1)
    return ", ".join([*(each.split()[-1].lstrip("&*") for each in declaration.split(",")), "/"])
