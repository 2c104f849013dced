"""Command lines that people wrote for other Megatrons, made small, train here; and the same without what changes no
result.

python -m tests.e2e.launch_lines LINES.jsonl --runs 20

Each line of the file is a JSON object with `argv`, the flags of a training command, and `world`, its number of
processes or null. Of the lines that are accepted the first ones of as many kinds as there are (source, layout) are run
twice for 5 iterations on the CPU: as they are written, but for sizes, layout, files and lengths; and as the equivalent
command of tools/check_flags.py. Every loss has to be the same to the last digit that is printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from megatron.command_line.flag_check import check_command
from megatron.command_line.read import read
from megatron.config.run import RunConfig
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import figures, write_dataset

ITERATIONS = 5
# Files and programs beside the run, and what only goes with them.
LEFT_OUT = """
    load pretrained_checkpoint load_hf use_checkpoint_args ckpt_step exit_on_missing_checkpoint tokenizer_type
    tokenizer_model vocab_file merge_file tiktoken_pattern tiktoken_num_special_tokens chat_template
    trust_remote_code wandb_project wandb_entity wandb_exp_name wandb_save_dir tensorboard_dir data_cache_path
    data_path train_data_path valid_data_path test_data_path mock_data sft save save_interval save_hf vocab_size
    fixed_padded_vocab_size make_vocab_size_divisible_by iterations_to_skip exit_interval
"""
# Sizes, of which a small one is given again where the line has one.
SIZES = """
    initial_loss_scale num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length
    max_position_embeddings micro_batch_size global_batch_size rampup_batch_size train_iters train_samples
    lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples
    eval_iters eval_interval log_interval num_workers recompute_num_layers cpu_offloading_num_layers
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    microbatch_group_size_per_virtual_pipeline_stage window_size window_attn_skip_freq
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    hierarchical_context_parallel_sizes num_distributed_optimizer_instances ddp_bucket_size
    num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_num_groups moe_router_group_topk
    moe_shared_expert_intermediate_size expert_model_parallel_size expert_tensor_parallel_size
"""


def shrunk(argv: Iterable[str], folder: Path) -> tuple[list[str], int]:
    """The command line with small sizes and files in `folder`, all other words as they are typed, and its processes."""
    line = read(list(argv))
    left = {*LEFT_OUT.split(), *SIZES.split()}
    kept = [word for o in line.outcomes if not _fields(o.meant) & left for word in (o.typed.flag, *o.typed.words)]
    small, world = _sizes(line.run)
    data = ["--mock-data"] if line.run.data.mock_data else ["--data-path", str(folder / "data")]
    vocabulary = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    words = [word for name, value in small.items() for word in (name, *str(value).split())]
    return [*kept, *words, *data, *vocabulary, "--num-workers", "0", "--log-interval", "1"], world


def _fields(words: tuple[str, ...]) -> set[str]:
    return set(read(words).run.given) if words else set()


def _sizes(run: RunConfig) -> tuple[dict[str, object], int]:
    p, m, given = run.parallel, run.model, run.given
    tp, cp = min(2, p.tensor_model_parallel_size), min(2, p.context_parallel_size)
    pp = min(2, p.pipeline_model_parallel_size) if tp * cp < 4 else 1
    if "a2a+p2p" in p.cp_comm_type and cp > 1:
        tp, cp, pp = 1, 4, 1
    chunks = 2 if pp > 1 and _is_interleaved(run) else 1
    layers = 2 * pp * chunks
    sizes: dict[str, object] = {
        "--num-layers": layers - p.account_for_embedding_in_pipeline_split - p.account_for_loss_in_pipeline_split,
        "--hidden-size": 64,
        "--num-attention-heads": 4,
        "--seq-length": 64,
        "--micro-batch-size": 1,
        "--global-batch-size": 4,
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--context-parallel-size": cp,
        "--eval-iters": 0,
    }
    sizes |= {"--ffn-hidden-size": 96} if "ffn_hidden_size" in given else {}
    sizes |= {"--num-query-groups": min(2, m.num_query_groups or 1)} if m.group_query_attention else {}
    sizes |= {"--kv-channels": 16} if m.kv_channels else {}
    sizes |= {"--max-position-embeddings": 64} if m.max_position_embeddings else {}
    sizes |= {"--window-size": "15,0"} if m.window else {}
    sizes |= {"--recompute-num-layers": 1} if run.recompute.recompute_num_layers else {}
    sizes |= {"--cpu-offloading-num-layers": 1} if run.activation_offload.cpu_offloading_num_layers else {}
    sizes |= {"--hierarchical-context-parallel-sizes": "2 2"} if cp == 4 else {}
    sizes |= {"--num-layers-per-virtual-pipeline-stage": layers // pp // 2} if chunks == 2 else {}
    sizes |= {"--train-samples": 4 * ITERATIONS} if run.train.train_samples else {"--train-iters": ITERATIONS}
    sizes |= {"--initial-loss-scale": 1024} if m.fp16 and run.optimizer.loss_scale is None else {}
    if run.schedule.lr_decay_style == "WSD":
        sizes |= {"--lr-wsd-decay-samples": 8} if run.train.train_samples else {"--lr-wsd-decay-iters": 2}
    world = tp * pp * cp * (2 if tp * pp * cp <= 2 else 1)
    if m.num_experts is not None:
        sizes |= _expert_sizes(run, layers, world // (tp * pp))
    return sizes, world


def _expert_sizes(run: RunConfig, layers: int, most: int) -> dict[str, object]:
    """Of at most `most` ranks of ep, where a layer without experts is first if the line has any."""
    p, m = run.parallel, run.model
    some = m.moe_layer_freq is not None and not all(m.moe_layers)
    sizes: dict[str, object] = {
        "--num-experts": 8,
        "--moe-router-topk": min(2, m.moe_router_topk),
        "--moe-layer-freq": f"[0]+[1]*{layers - 1}" if some else 1,
        "--expert-model-parallel-size": min(2, most, p.expert_model_parallel_size),
    }
    sizes |= {"--expert-tensor-parallel-size": 1} if p.expert_tensor_parallel_size else {}
    sizes |= {"--moe-ffn-hidden-size": 32} if m.moe_ffn_hidden_size else {}
    sizes |= {"--moe-shared-expert-intermediate-size": 48} if m.moe_shared_expert_intermediate_size else {}
    if m.moe_router_group_topk is not None:
        sizes |= {"--moe-router-num-groups": 2, "--moe-router-group-topk": 1}
    return sizes


def _is_interleaved(run: RunConfig) -> bool:
    p = run.parallel
    return bool(p.num_layers_per_virtual_pipeline_stage or (p.num_virtual_stages_per_pipeline_rank or 1) > 1)


def printed(argv: list[str], folder: Path, world_size: int) -> dict[int, list[str]]:
    """Loss and gradient norm of each iteration, as they are printed."""
    folder.mkdir(parents=True)
    result = run(argv, folder, world_size, timeout=300.0)
    assert result.codes == [0] * world_size, result.text
    found = figures(result.stdout[0])
    assert len(found) == ITERATIONS, result.stdout[0]
    return found


def compare(argv: list[str], folder: Path) -> tuple[dict[int, list[str]], dict[int, list[str]], int]:
    """(figures as it is written, figures of the equivalent command, processes) of one line."""
    write_dataset(folder / "data", 1)
    words, world = shrunk(argv, folder)
    verdict = check_command(words, world)
    assert verdict.accepted, verdict.problems
    return printed(words, folder / "given", world), printed(list(verdict.words), folder / "read", world), world


def _kinds(path: Path, wanted: int) -> list[dict[str, object]]:
    """Accepted lines of as many kinds as there are."""
    seen, found = set(), []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        verdict = check_command(line["argv"], line.get("world"))
        if not verdict.accepted:
            continue
        p = read(line["argv"]).run.parallel
        kind = (
            line.get("source"),
            *(min(2, size) for size in (p.tensor_model_parallel_size, p.pipeline_model_parallel_size)),
            min(2, p.context_parallel_size),
            _is_interleaved(read(line["argv"]).run),
        )
        if kind not in seen:
            seen.add(kind)
            found.append(line)
    return found[:wanted]


def main(argv: list[str]) -> int:
    """Print a line for each command; exit code 1 when losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args(argv)
    wrong = 0
    for line in _kinds(args.lines, args.runs):
        name = f"{line.get('source', '')} {line.get('path', '')}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                given, read_as, world = compare(line["argv"], Path(folder))
            except AssertionError as error:
                given, read_as, world = {}, {0: []}, 0
                print(str(error)[-1500:], file=sys.stderr)
        wrong += given != read_as
        last = " ".join(given.get(ITERATIONS, []))
        print(f"{'same' if given == read_as else 'DIFFER'}  world {world}  {last}  {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
