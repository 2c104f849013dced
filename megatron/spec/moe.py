"""A mixture-of-experts layer as data: the router, the experts that it chooses from, and the experts that all tokens
share.

Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961. Shared experts, groups of experts and the bias of the
choice: DeepSeek-V2 and -V3, arXiv 2405.04434 and 2412.19437.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.spec.linear import LinearSpec
from megatron.spec.mlp import PLAIN_GATE, GateForm, MLPSpec, XieluSpec
from megatron.spec.parameter import SEQUENCE, Init, ParamSpec, Shard

EXPERT_BIAS = "expert_bias"


@dataclass(frozen=True)
class RouterSpec:
    """Scores all experts for each token, and chooses `topk` of them.

    score_function: "softmax" over all experts, or "sigmoid" of each logit. normalized: the scores of the chosen experts
    are divided by their sum. scaling: a factor on them in any case. groups: the number of equal runs of experts; the
    best `group_topk` take part: by the maximum of their scores ("max"), or by the sum of their best topk / group_topk
    scores ("sum"). by_logits: groups and experts are chosen by the logits, as a softmax over the chosen experts asks
    for: sums of logits order groups otherwise than sums of scores. dtype: the dtype of logits and scores, "fp32" or
    "fp64". has_bias: an fp32 bias per expert is added to the scores for the choice, and not for the weights.
    linear_bias: the logits have a trained bias.
    """

    hidden: int
    experts: int
    topk: int
    score_function: str
    normalized: bool
    scaling: float = 1.0
    groups: int = 1
    group_topk: int = 1
    group_score: str = "sum"
    by_logits: bool = False
    dtype: str = field(default="fp32", compare=False)
    has_bias: bool = False
    init: Init = field(default=Init("normal", 0.02), compare=False)
    linear_bias: bool = False

    @property
    def weight(self) -> ParamSpec:
        """[experts, hidden], on every rank."""
        return ParamSpec((self.experts, self.hidden), self.init, input_sharding=SEQUENCE)

    @property
    def bias(self) -> ParamSpec | None:
        """[experts], on every rank, or None."""
        if not self.linear_bias:
            return None
        return ParamSpec((self.experts,), Init("constant", 0.0), input_sharding=SEQUENCE, decay=False)

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    @property
    def multiply_adds(self) -> int:
        """Per token."""
        return self.experts * self.hidden


@dataclass(frozen=True)
class ExpertsSpec:
    """MLPs of `width` inner channels, stacked in tensors that are sharded over ep and etp.

    linear_fc1 [experts, 2, width, hidden] with a gated activation, else [experts, width, hidden].
    linear_fc2 [experts, hidden, width]. With biases: fc1_bias [experts, 2, width] or [experts, width], and fc2_bias
    [experts, hidden], whose channels etp shards: each rank adds its own to its part of the sum over etp.
    """

    hidden: int
    experts: int
    width: int
    activation: str
    gated: bool
    init: Init = field(default=Init("normal", 0.02), compare=False)
    output_init: Init = field(default=Init("normal", 0.02), compare=False)
    has_bias: bool = False
    gate: GateForm = PLAIN_GATE

    @property
    def linear_fc1(self) -> ParamSpec:
        """See the class."""
        outputs = (2, self.width) if self.gated else (self.width,)
        shape = (self.experts, *outputs, self.hidden)
        return ParamSpec(shape, self.init, (Shard("ep", 0), Shard("etp", len(outputs))), stacked=True)

    @property
    def linear_fc2(self) -> ParamSpec:
        """See the class."""
        shape = (self.experts, self.hidden, self.width)
        return ParamSpec(shape, self.output_init, (Shard("ep", 0), Shard("etp", 2)), stacked=True)

    @property
    def fc1_bias(self) -> ParamSpec | None:
        """See the class; None without biases."""
        return self._bias(self.linear_fc1.shape[:-1])

    @property
    def fc2_bias(self) -> ParamSpec | None:
        """See the class; None without biases."""
        return self._bias((self.experts, self.hidden))

    def _bias(self, shape: tuple[int, ...]) -> ParamSpec | None:
        if not self.has_bias:
            return None
        shards = (Shard("ep", 0), Shard("etp", len(shape) - 1))
        return ParamSpec(shape, Init("constant", 0.0), shards, stacked=True, decay=False)

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "linear_fc1.weight", self.linear_fc1
        if self.fc1_bias is not None:
            yield "linear_fc1.bias", self.fc1_bias
        yield "linear_fc2.weight", self.linear_fc2
        if self.fc2_bias is not None:
            yield "linear_fc2.bias", self.fc2_bias

    @property
    def multiply_adds(self) -> int:
        """Per token and expert."""
        return (math.prod(self.linear_fc1.shape) + math.prod(self.linear_fc2.shape)) // self.experts


@dataclass(frozen=True)
class GateSpec:
    """A number per token that multiplies the output of the shared experts: sigmoid(x gate_weight^T), [1, hidden]."""

    hidden: int
    init: Init = field(default=Init("normal", 0.02), compare=False)

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "gate_weight", ParamSpec((1, self.hidden), self.init, input_sharding=SEQUENCE)


@dataclass(frozen=True)
class MoESpec:
    """The sum of a token's experts, each times its weight, and of the shared experts, times their gate if there is
    one."""

    router: RouterSpec
    experts: ExpertsSpec
    shared: MLPSpec | None = None
    shared_gate: GateSpec | None = None

    def parts(self) -> Iterator[tuple[str, LinearSpec | XieluSpec | RouterSpec | ExpertsSpec | GateSpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        yield "router", self.router
        yield "experts", self.experts
        if self.shared is not None:
            yield from ((f"shared_experts.{path}", spec) for path, spec in self.shared.parts())
        if self.shared_gate is not None:
            yield "shared_experts", self.shared_gate

    @property
    def multiply_adds(self) -> int:
        """Per token, of the router, the chosen experts and the gate; the shared experts' linear layers are not
        included."""
        gate = 0 if self.shared_gate is None else self.shared_gate.hidden
        return self.router.multiply_adds + self.router.topk * self.experts.multiply_adds + gate
