import dataclasses

from megatron.config.features import Facts, Feature, features, format_table
from tests.unit.config.runs import make_run

ALONE = Facts(
    tp=1,
    dp=1,
    device="cpu",
    backend=None,
    attention_choice="fused (torch SDPA; no flash: no CUDA device)",
    fusion_missing=None,
    upcast_products=False,
    separate_main_grads=False,
    buckets=3,
)


def row(name, facts=ALONE, **fields):
    (found,) = [r for r in features(make_run(**fields), facts) if r.name == name]
    return found.asked, found.in_effect, found.why


def test_tensor_parallelism():
    assert row("tensor parallelism") == ("off", "off", "")
    assert row("tensor parallelism", dataclasses.replace(ALONE, tp=4)) == ("tp 4", "tp 4", "")


def test_sequence_parallelism_says_why_it_is_off():
    assert row("sequence parallelism") == ("off", "off", "")
    assert row("sequence parallelism", sequence_parallel=True) == ("on", "off", "tp = 1")
    assert row("sequence parallelism", dataclasses.replace(ALONE, tp=2), sequence_parallel=True) == ("on", "on", "")


def test_gradient_reduction():
    assert row("gradient reduction") == ("auto", "off", "dp = 1")
    four = dataclasses.replace(ALONE, dp=4, backend="gloo")
    assert row("gradient reduction", four) == ("auto", "all-reduce after backward, 3 buckets, gloo", "dp = 4")


def test_attention_kernel_is_split_from_its_reason():
    assert row("attention kernel") == ("auto", "fused", "torch SDPA; no flash: no CUDA device")
    plain = dataclasses.replace(ALONE, attention_choice="unfused")
    assert row("attention kernel", plain, attention_backend="unfused") == ("unfused", "unfused", "")


def test_gradient_accumulation_fusion():
    name = "gradient accumulation fusion"
    missing = dataclasses.replace(ALONE, fusion_missing="no such GEMM on cpu")
    assert row(name) == ("on", "on", "")
    assert row(name, missing) == ("on", "off", "no such GEMM on cpu")
    assert row(name, missing, gradient_accumulation_fusion=False) == ("off", "off", "")


def test_main_gradients():
    assert row("fp32 main gradients") == ("auto", "off", "parameters are fp32 themselves")
    half = dataclasses.replace(ALONE, separate_main_grads=True)
    assert row("fp32 main gradients", half, bf16=True) == ("auto", "on", "parameters are bfloat16")


def test_dropout():
    assert row("dropout") == ("attention 0.1, hidden 0.1", "attention 0.1, hidden 0.1", "")
    assert row("dropout", attention_dropout=0.0, hidden_dropout=0.0) == ("off", "off", "")
    assert row("dropout", skip_train=True) == ("attention 0.1, hidden 0.1", "off", "evaluation only")


def test_loss_scaling():
    assert row("loss scaling", bf16=True) == ("auto", "off", "bfloat16 needs none")
    assert row("loss scaling", fp16=True, initial_loss_scale=64.0) == ("auto", "dynamic from 64", "float16")
    assert row("loss scaling", fp16=True, loss_scale=128.0) == ("fixed 128", "fixed 128", "")


def test_deterministic_mode():
    assert row("deterministic mode", deterministic_mode=True) == ("on", "on", "")


def test_table_is_aligned():
    table = format_table([Feature("a", "on", "off", "tp = 1"), Feature("long name", "on", "on", "")])
    assert table == (
        "feature    asked  in effect  why\n"
        "a          on     off        tp = 1\n"
        "long name  on     on"
    )  # fmt: skip


def test_every_row_is_one_line():
    text = format_table(features(make_run(), ALONE))
    assert len(text.splitlines()) == 1 + len(features(make_run(), ALONE))


def test_products_of_a_slow_dtype_are_said_to_be_taken_in_fp32():
    slow = dataclasses.replace(ALONE, upcast_products=True)
    assert row("matrix products", slow, bf16=True) == ("bfloat16", "float32", "this CPU has no fast bfloat16 products")
    assert row("matrix products") == ("float32", "float32", "")
