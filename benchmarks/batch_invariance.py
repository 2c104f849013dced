"""Generation beside training: how often their log-probabilities are equal, and the price of --batch-invariant-mode.

Every model samples with and without the mode. Its tokens are compared with a forward pass of training that packs four
sequences into a row: the share of tokens with the same bits, the largest absolute difference of log-probabilities, and
the estimate k3 of the divergence. *training* is the CPU time of a forward and backward over the packed rows, *decoding*
that of the sampling, each with the mode divided by without. Both take turns in one process; ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.logprob_parity import (
    LogprobDifference,
    SampledSequence,
    difference,
    pack,
    sample,
    trained_logprobs,
)
from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.groups import create_groups
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops.attention_segments import segments_of

CPU = torch.device("cpu")
WORDS, PER_ROW = 1000, 4
EXPERTS = {"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 128}
MODELS = {"dense": {}, "32 experts, 4 per token": EXPERTS}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="sampled behind each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.layers} layers, h {args.hidden}, {args.prompts} sequences, torch {torch.__version__}, one thread")
    print("| model | dtype | mode | equal | largest difference | k3 | training | decoding |")
    print("|---|---|---|---|---|---|---|---|")
    for name, fields in MODELS.items():
        for bf16 in (False, True):
            sides = [Side(args, mode=mode, bf16=bf16, **fields) for mode in (False, True)]
            rounds = [[(side.train(), side.decode()) for side in sides] for _ in range(args.rounds + 1)][1:]
            prices = [statistics.median(on[i] / off[i] for off, on in rounds) for i in range(2)]
            for side, (training, decoding) in zip(sides, [(1.0, 1.0), prices], strict=True):
                gap = side.difference()
                print(
                    f"| {name} | {'bf16' if bf16 else 'fp32'} | {'on' if side.mode else 'off'} | {gap.equal:.1%} | "
                    f"{gap.largest:.2g} | {gap.k3:.2g} | {training:.2f} | {decoding:.2f} |",
                    flush=True,
                )


class Side:
    """A model with or without the mode, and the sequences that it has sampled last."""

    def __init__(self, args: argparse.Namespace, *, mode: bool, bf16: bool, **fields: int) -> None:
        config = ModelConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=8,
            group_query_attention=True,
            num_query_groups=4,
            ffn_hidden_size=3 * args.hidden,
            vocab_size=WORDS,
            max_position_embeddings=512,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=0.06,
            bf16=bf16,
            batch_invariant_mode=mode,
            **fields,  # type: ignore[arg-type]
        )
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        self._build = Build(config, groups, False, choose_kernels(config, CPU), RngTracker(1, groups, CPU), CPU)
        self._model, self._tokenizer, self.mode = GPTModel(self._build), NullTokenizer(WORDS), mode
        initialize(local_parameters(self._model), 1)
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(8, 64, (args.prompts,), generator=generator).tolist()
        self._prompts = [torch.randint(WORDS, (length,), generator=generator).tolist() for length in lengths]
        self._tokens, self._sampled = args.tokens, list[SampledSequence]()
        self.decode()

    def decode(self) -> float:
        """Samples; returns the seconds of CPU time."""
        self._model.eval()
        begin = time.process_time()
        self._sampled = sample(
            self._model,
            self._build,
            self._tokenizer,
            self._prompts,
            max_new_tokens=self._tokens,
            sampling=Sampling(temperature=1.0),
            seeds=range(len(self._prompts)),
        )
        return time.process_time() - begin

    def train(self) -> float:
        """Runs a forward and backward; returns the seconds of CPU time."""
        packed = pack(self._sampled, PER_ROW)
        self._model.train().zero_grad()
        begin = time.process_time()
        losses = self._model(packed.tokens, packed.positions, packed.labels, segments_of(packed.ids, CPU))
        losses.sum().backward()
        return time.process_time() - begin

    @torch.no_grad()
    def difference(self) -> LogprobDifference:
        """Compares the sampled tokens with training."""
        trained = trained_logprobs(self._model.train(), self._build, self._sampled, per_row=PER_ROW)
        assert trained is not None
        return difference(self._sampled, trained)


if __name__ == "__main__":
    main()
