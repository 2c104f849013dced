"""An external sampler: transformers answers prompts from a folder of the current weights, and the trainer learns."""

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.datasets.sample import Splits
from megatron.rl.external_sampler import ExternalSampler
from megatron.rl.learner import RolloutReader
from megatron.rl.policy import Policy
from megatron.rl.rollout import Rollouts
from megatron.rl.sampler import GREEDY
from tests import pool
from tests.parallel.rl_runs import EXPERTS, make_trainer
from tests.parallel.test_rollouts import EvenTokens, prompt_at

LIMIT = 2e-5  # transformers' products have other shapes, and its log-probabilities are of logits in another layout
ENGINE = '''
import pathlib
import threading

import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "weights"


class Sampler:
    def start(self, settings):
        self.stop_ids = list(settings.stop_ids)
        self.iterations = []

    def update(self, weights):
        self.iterations.append(weights.iteration)
        self.streamed = dict(weights)
        folder = weights.save(FOLDER)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def sample(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        torch.manual_seed(request.seed % 2**31)
        ids = torch.tensor([request.prompt_ids])
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens,
            eos_token_id=self.stop_ids, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            **(sampling if request.temperature else {"do_sample": False}),
        )
        new = out.sequences[0, ids.shape[1]:]
        scores = torch.stack(out.logits, 1)[0].float() / (request.temperature or 1.0)
        return new.tolist(), scores.log_softmax(-1).gather(1, new[:, None])[:, 0]


class Held(Sampler):
    """Samples on another thread only when the test lets it."""

    gate = threading.Event()

    def sample(self, requests):
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
            self.gate.clear()
        return super().sample(requests)


class Faulty:
    def start(self, settings):
        pass

    def update(self, weights):
        next(iter(weights))

    def sample(self, requests):
        return [([1, 2], [-1.0])] * len(requests)


class Late(Sampler):
    def update(self, weights):
        self.weights = weights

    def sample(self, requests):
        return [(len(name), value) for name, value in self.weights]


class Incomplete:
    def start(self, settings):
        pass

    def sample(self, requests):
        return []


class Full(Incomplete):
    def update(self, weights):
        raise OSError("no room on the device")
'''
LAG = "--rl-generation-lag 1 --sequence-parallel"
WORDS = "--num-layers 2 --rl-default-temperature 0.8 --rollout-max-response-len 8 --tis-clip 2"


def make_reader(size, words, engine):
    trainer, tokenizer = make_trainer(size, f"--rl-external-sampler {engine} {WORDS} {words}")
    groups, config = trainer.groups, trainer.run.rl
    sampler = ExternalSampler(
        trainer, tokenizer, config.rl_external_sampler, temperature=config.rollout_temperature, stop_ids=()
    )
    rewards = EvenTokens() if groups.model.rank == 0 else None
    rollouts = Rollouts(config, groups, sampler, prompt_at, rewards, 1)
    reader = RolloutReader(trainer, rollouts, Policy(config, groups.dp), None, None)
    trainer.readers = Splits(reader, None, None)
    trainer.model.train()
    return trainer, sampler, reader


def learned(rank, size, words, engine):
    """(figures of two rollouts, the answers of the second one, what the engine has, on the first rank)"""
    torch.set_num_threads(1)
    trainer, sampler, reader = make_reader(size, words, engine)
    for _ in range(2):
        trainer.train_step()
    taken = None if sampler._engine is None else (sampler._engine.iterations, sampler._engine.streamed)
    answers = [[(answer.ids, answer.text) for answer in group] for group in reader.reports[1].rollout.groups]
    return [report.numbers for report in reader.reports], answers, taken


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    return tmp_path / "engine.py"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        pytest.param(2, f"{EXPERTS} --expert-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer", marks=pytest.mark.slow),
    ],
)
def test_transformers_samples_from_the_current_weights(engine, size, words):
    """Its log-probabilities are those of the trainer, also behind an update, which changes them much more."""
    ranks = pool.run(size, learned, words, engine)
    (numbers, answers, (iterations, streamed)), *_ = ranks
    assert all(rank[1] == answers for rank in ranks), "all ranks have the answers of all replicas"
    assert iterations == [0, 1] and [rank[2] for rank in ranks[1:]] == [None] * (size - 1)
    assert [figures["largest difference"] for figures in numbers] == pytest.approx([0.0, 0.0], abs=LIMIT)
    assert numbers[0]["sampled tokens"] > 8 and len({ids for group in answers for ids, _ in group}) > 4
    assert all(text.split() == [str(i) for i in ids if i != 63] for group in answers for ids, text in group)
    saved = load_file(engine.parent / "weights/model.safetensors")
    assert saved.keys() == streamed.keys() and all(torch.equal(saved[name], streamed[name]) for name in saved)


def learned_with_a_lag(rank, size, engine):
    """(figures of three rollouts, iterations of the weights that the engine got, on the first rank)"""
    torch.set_num_threads(1)
    trainer, sampler, reader = make_reader(size, f"{LAG} --tensor-model-parallel-size 2", engine)
    for step in range(3):
        trainer.train_step()  # it ends although the answers for the next one are held back
        if sampler._engine is not None:
            sampler._engine.gate.set()
        if step == 0:  # an evaluation waits for them, and then has the weights as they are
            reader.rollouts.answers([(0, prompt_at(0))], 1, {}, GREEDY)
    return [report.numbers for report in reader.reports], sampler._engine and sampler._engine.iterations


def test_answers_for_the_next_step_are_sampled_while_one_trains(engine):
    """From the weights before its update: the trainer's log-probabilities are others than theirs, by much more than
    rounding."""
    (numbers, iterations), (others, _) = pool.run(2, learned_with_a_lag, f"{engine}:Held")
    assert [figures["staleness"] for figures in numbers] == [0, 1, 1] and iterations == [0, 1]
    first, *late = [figures["largest difference"] for figures in numbers]
    assert first < LIMIT and min(late) > 100 * LIMIT
    assert [figures["reward"] for figures in others] == [figures["reward"] for figures in numbers]


def refused(rank, size, engine):
    trainer, _, _ = make_reader(size, "--tensor-model-parallel-size 2", engine)
    trainer.train_step()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Faulty", "sample returned 2 tokens with 1 log-probabilities"),
        ("Incomplete", "has no method update; write it"),
        ("Late", r"sample failed: RuntimeError: the weights of a run can be read only while"),
        ("Full", r"update failed: OSError: no room on the device \(line 80\)"),
    ],
)
def test_mistakes_of_the_class_are_told_on_all_ranks(engine, name, reason):
    with pytest.raises(Exception, match=f"engine.py:{name}:? {reason}"):
        pool.run(2, refused, f"{engine}:{name}")
