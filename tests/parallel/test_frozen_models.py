"""Models that are never trained, teachers and reward models: transformers' numbers under every layout."""

import json

import pytest
import torch
from transformers import LlamaConfig, PhiConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.phi.modeling_phi import PhiForSequenceClassification
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForSequenceClassification
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

from megatron.base.errors import CheckpointError, ConfigError, DataError
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.rl.answers import Answered, pack, shares
from megatron.rl.forward import current_log_probabilities
from megatron.rl.main import build
from megatron.rl.prompts import Prompt
from megatron.rl.reward_model import RewardModel
from megatron.rl.teacher import open_teacher
from tests import pool
from tests.parallel.rl_runs import CPU, MODEL, make_trainer, read_run
from tests.parallel.test_rollouts import CP, PP, TP, assert_same, expected, learned
from tests.unit.inference.serving import write_tokenizer
from tests.unit.models.hf_models import make_hf_model, random_model

LIMIT = 1e-5
DP = "--use-distributed-optimizer"
LAYOUTS = [(1, ""), (2, TP), (2, PP), (2, CP), (2, DP)]
# Another width, depth and vocabulary than those of the policy.
SHAPE = {
    "vocab_size": 70,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}
ANSWERS = [
    Answered(prompt_ids=(1, 2, 3), ids=(5, 6, 7, 8, 9, 63)),
    Answered(prompt_ids=(4, 5), ids=tuple(range(10, 50))),
    Answered(prompt_ids=(6,), ids=(11, 3)),
    Answered(prompt_ids=(9, 8, 7, 60), ids=tuple(range(20, 0, -1))),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """(folder, model of transformers)"""
    folder = tmp_path_factory.mktemp("teacher")
    model = random_model(LlamaForCausalLM, LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    return str(folder), model


def rated(rank, size, folder, words):
    """(number of the answer, its log-probabilities) of this rank's replica, twice: the weights return to the device."""
    trainer, tokenizer = make_trainer(size, words)
    model, dp = open_teacher(folder, trainer, tokenizer), trainer.groups.dp
    replicas = shares(ANSWERS, dp.size)
    packed = pack(replicas, dp.rank, seq_length=64, micro_batch_size=1, device=CPU)
    first, again = (model.log_probabilities(packed.batches) for _ in range(2))
    assert torch.equal(first, again)
    numbers = range(*(part * len(ANSWERS) // dp.size for part in (dp.rank, dp.rank + 1)))
    inside = packed.mask > 0
    return [(n, first[inside & (packed.sequences == at)].tolist()) for at, n in enumerate(numbers)]


@pytest.mark.parametrize(("size", "layout", "temperature"), [*((*layout, 1.0) for layout in LAYOUTS), (1, "", 0.7)])
def test_a_teacher_has_the_log_probabilities_of_transformers(teacher, size, layout, temperature):
    folder, model = teacher
    expected = []
    for answer in ANSWERS:
        ids = torch.tensor([[*answer.prompt_ids, *answer.ids]])
        with torch.no_grad():
            logs = (model(ids).logits[0].double() / temperature).log_softmax(-1)
        begin = len(answer.prompt_ids)
        expected.append([float(logs[at - 1, ids[0, at]]) for at in range(begin, ids.shape[1])])
    words = f"{layout} --rl-default-temperature {temperature}"
    ranks = pool.run(size, rated, folder, words)
    assert {number for answers in ranks for number, _ in answers} == set(range(len(ANSWERS)))
    for answers in ranks:
        for number, values in answers:
            assert values == pytest.approx(expected[number], rel=0, abs=LIMIT)


@pytest.mark.parametrize(("size", "layout"), [(1, ""), (2, TP)])
def test_a_teacher_may_have_experts_where_the_policy_has_none(tmp_path, size, layout):
    model = make_hf_model("qwen3 moe")
    model.save_pretrained(tmp_path)
    (answers, *_) = pool.run(size, rated, str(tmp_path), layout)
    for number, values in answers:
        ids = torch.tensor([[*ANSWERS[number].prompt_ids, *ANSWERS[number].ids]])
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).flatten()
        assert values == pytest.approx(logs[-len(values) :].tolist(), rel=0, abs=LIMIT)


@pytest.mark.parametrize(("size", "layout"), [(2, TP), (2, PP), pytest.param(2, DP, marks=pytest.mark.slow)])
def test_distillation_is_the_same_under_every_layout(teacher, size, layout):
    words = f"--opd-teacher-load {teacher[0]} --opd-kl-coef 0.5 --lr 0.01"
    numbers = expected(words)[2]
    assert all(of_rollout["teacher-k1"] > 0 for of_rollout in numbers)
    ranks = pool.run(size, learned, f"{words} {layout}")
    assert_same(words, ranks)
    for of_rank in ranks:
        for mine, theirs in zip(of_rank[2], numbers, strict=True):
            assert mine["teacher-k1"] == pytest.approx(theirs["teacher-k1"], rel=1e-4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a model that a run begins with."""
    folder = tmp_path_factory.mktemp("policy")
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    random_model(LlamaForCausalLM, LlamaConfig(**SHAPE | shape | heads)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("size", "layout"), [(1, ""), (2, TP)])
def test_a_teacher_that_is_the_policy_teaches_nothing(policy, size, layout):
    """Both pad the vocabulary alike, so that the products are the same to the last bit."""
    words = f"--load-hf {policy} --make-vocab-size-divisible-by 128 {layout}"
    without = pool.run(size, learned, words, 1)[0]
    losses, norms, numbers, *_ = pool.run(size, learned, f"{words} --opd-teacher-load {policy}", 1)[0]
    assert numbers[0]["teacher-k1"] == 0.0
    assert (losses, norms, numbers[0]["objective"]) == (without[0], without[1], without[2][0]["objective"])


def weights_of_a_step(rank, size, words):
    """Weights of the tokens of a step without rewards, and the teacher's log-probabilities less the policy's."""
    run, groups = read_run(size, words)
    trainer = build(run, groups, CPU)
    reader = trainer.readers.train
    batches = reader.read(1)
    mask = torch.cat([batch.loss_mask for batch in batches])
    difference = reader._teacher.log_probabilities(batches) - current_log_probabilities(trainer, batches)
    return torch.cat([batch.weights for batch in batches]), difference * mask, int(mask.sum())


def test_without_rewards_the_gradient_is_that_of_the_divergence_from_the_teacher(teacher, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} {number + 1}"}) + "\n" for number in range(4)))
    words = f"""
        {MODEL} --prompt-data {prompts} --opd-teacher-load {teacher[0]} --opd-kl-coef 0.5 --rl-objective reinforce
        --rollout-max-response-len 16 --grpo-prompts-per-step 4 --grpo-group-size 1
    """
    weights, difference, tokens = pool.run(1, weights_of_a_step, words)[0]
    assert torch.allclose(weights, 0.5 * difference / tokens, atol=1e-7) and float(difference.abs().max()) > 0.5


CLASSIFIERS = {
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "qwen2": (Qwen2ForSequenceClassification, Qwen2Config),
    "qwen3": (Qwen3ForSequenceClassification, Qwen3Config),
    "phi": (PhiForSequenceClassification, PhiConfig),  # its head has a bias, where it has one
}
TURNS = [
    ({"role": "user", "content": "Which one?"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}),
]
PROMPTS = [
    *(Prompt(n, (1, 2), text, None, {}) for n, text in enumerate(("3 1", "4 4 4 =", "A longer one " * 6))),
    *(Prompt(3 + n, (1, 2), "rendered for the policy", None, {}, messages) for n, messages in enumerate(TURNS)),
]
TEXTS = ["7 7", "", "an answer that makes the row longer than those of the policy", "That one.", "So."]


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory):
    """Name -> (folder, the score of each answer by transformers)"""
    models = {}
    for name, (cls, config) in CLASSIFIERS.items():
        folder = tmp_path_factory.mktemp(name)
        model = random_model(
            cls, config(**{**SHAPE, "vocab_size": 264, "num_labels": 1, "tie_word_embeddings": name != "llama"})
        )
        model.save_pretrained(folder)
        library = HuggingFaceTokenizer(write_tokenizer(folder)).library
        scores = []
        for prompt, answer in zip(PROMPTS, TEXTS, strict=True):
            text = prompt.text + answer
            if prompt.messages is not None:
                turns = [*prompt.messages, {"role": "assistant", "content": answer}]
                text = library.apply_chat_template(turns, tokenize=False)
            with torch.no_grad():
                scores.append(float(model(torch.tensor([library.encode(text, add_special_tokens=False)])).logits))
        models[name] = str(folder), scores
    return models


def scored(rank, size, folder, words):
    trainer, _ = make_trainer(size, words)
    return RewardModel(folder, trainer).scores(PROMPTS, TEXTS)


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [*(("llama", *layout) for layout in LAYOUTS), ("qwen2", 1, ""), ("qwen3", 2, PP), ("phi", 1, "")],
)
def test_a_reward_model_has_the_scores_of_transformers(reward_models, name, size, layout):
    folder, scores = reward_models[name]
    assert len({round(score, 3) for score in scores}) == len(scores)
    for of_rank in pool.run(size, scored, folder, layout):
        assert of_rank == pytest.approx(scores, rel=0, abs=LIMIT)


def rewarded(rank, size, words):
    """The answers of a rollout, and their rewards and figures."""
    run, groups = read_run(size, words)
    trainer = build(run, groups, CPU)
    rollouts = trainer.readers.train.rollouts
    answers = [answer for group in rollouts.run(0).groups for answer in group]
    rollouts.close()
    return [(answer.text, answer.reward, answer.numbers) for answer in answers]


@pytest.mark.parametrize("function", ["", "--custom-rm-path"])
def test_scores_are_rewards_and_are_added_to_those_of_a_function(reward_models, tmp_path, function):
    prompts, rewards = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    prompts.write_text(json.dumps({"prompt": "3 1"}) + "\n")
    rewards.write_text("def reward(prompt, completion, label):\n    return {'score': 10.0, 'words': 2}\n")
    function = f"{function} {rewards} --rm-workers 1" if function else ""
    words = f"""
        {MODEL} --prompt-data {prompts} --rollout-max-response-len 8 --grpo-prompts-per-step 1 --grpo-group-size 4
        --reward-model {reward_models["llama"][0]} --reward-model-coef 0.5 {function}
    """
    answers = pool.run(1, rewarded, words)[0]
    assert len({reward for _, reward, _ in answers}) == 4
    for _, reward, numbers in answers:
        assert reward == pytest.approx(0.5 * numbers["model score"] + (10.0 if function else 0.0))
        assert ("words" in numbers) is bool(function)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (2, r"score.weight is \[2, 48\], and a score is one number .* with one label"),
        (0, "holds no tensor score.weight"),
    ],
)
def test_a_model_that_gives_no_score_is_refused(tmp_path, labels, words):
    config = LlamaConfig(**SHAPE, num_labels=labels or 1)
    random_model(LlamaForSequenceClassification if labels else LlamaForCausalLM, config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    trainer, _ = make_trainer(1, "")
    with pytest.raises(CheckpointError, match=words):
        RewardModel(str(tmp_path), trainer)


def test_a_reward_model_needs_a_tokenizer_and_for_messages_a_template(tmp_path):
    trainer, _ = make_trainer(1, "")
    config = LlamaConfig(**{**SHAPE, "vocab_size": 264}, num_labels=1)
    random_model(LlamaForSequenceClassification, config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer, and a reward model reads text"):
        RewardModel(str(tmp_path), trainer)
    write_tokenizer(tmp_path, template=None)
    model = RewardModel(str(tmp_path), trainer)
    assert len(model.scores(PROMPTS[:1], TEXTS[:1])) == 1
    with pytest.raises(DataError, match="has no chat template, and prompts have messages"):
        model.scores(PROMPTS[3:], TEXTS[3:])


def test_a_model_that_the_layout_cannot_share_is_refused(tmp_path):
    """In the words of the layout's rules."""
    random_model(LlamaForCausalLM, LlamaConfig(**SHAPE | {"num_hidden_layers": 3})).save_pretrained(tmp_path)
    message = pool.run(2, refusal, str(tmp_path))[0]
    assert message.startswith(f"--opd-teacher-load {tmp_path}: ") and "3 layers" in message


def refusal(rank, size, folder):
    trainer, tokenizer = make_trainer(size, PP)
    with pytest.raises(ConfigError) as error:
        open_teacher(folder, trainer, tokenizer)
    return str(error.value)
