"""Tensors of Hugging Face folders that a run keeps, does not train, and writes back as they were."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration

from megatron.base.errors import CheckpointError
from megatron.config.rules.check import check
from megatron.core.dist_checkpointing.store import verify
from megatron.core.models.carried import IN_MEMORY, ON_HUB, check_carried_state
from megatron.core.models.hf.source import HFSource
from megatron.training.checkpoint import save_checkpoint
from megatron.training.export import CheckpointSource, save_hf
from megatron.training.setup import build
from megatron.training.start import take_shape_from_files
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.conversion.test_convert import tensors_of, there_and_back
from tests.unit.models.builds import CPU, GPT, make_ids
from tests.unit.models.hf_models import edit_json
from tests.unit.models.test_hf_conversion import IMAGES, TEXT
from tests.unit.models.test_hf_predictions import with_predictions
from tools.checkpoint import convert

DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
LEARN = {"lr": 1e-2, "lr_warmup_iters": 0, "global_batch_size": 2, "train_iters": 9}


def with_images(kind, folder, *, in_memory=False, dtype=torch.bfloat16):
    """A model for language and images; a tensor of no dims and one of integers are among those for images. Returns
    transformers' class."""
    if kind == "mistral3":
        text, images = {"model_type": "mistral", **TEXT, "sliding_window": None}, {"model_type": "pixtral", **IMAGES}
        model = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=images))
    else:
        text, images = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **IMAGES}
        model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=images))
    model.to(dtype).save_pretrained(folder, save_original_format=not in_memory)
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_scale"], tensors["vision_positions"] = torch.tensor(2.5), torch.arange(5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    return type(model)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert found[key].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), key


def begin(root, steps=0, given=(), **fields):
    """A run after some steps, saved; (its trainer, the folder that it wrote for transformers, its checkpoint)."""
    run = take_shape_from_files(
        make_run(given, **{**LEARN, **DROPOUT, **fields}, save=f"{root}/run", save_interval=100, save_hf=f"{root}/hf")
    )
    check(run, 1)
    trainer = build(run, pool.groups(), CPU)
    for _ in range(steps):
        trainer.train_step()
    path = save_checkpoint(trainer)
    return trainer, save_hf(trainer, path), path


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", ["mistral3", "llava"])
class TestPartsForImages:
    def test_there_and_back(self, tmp_path, kind, in_memory):
        """The whole folder comes back, under its names, and transformers computes the same."""
        cls = with_images(kind, tmp_path / "hf", in_memory=in_memory)
        source = HFSource(tmp_path / "hf")
        assert source.carried.prefix == (IN_MEMORY if in_memory else ON_HUB)
        back = there_and_back(tmp_path / "hf", tmp_path)
        assert_same(tensors_of(back), tensors_of(tmp_path / "hf"))
        config = json.loads((back / "config.json").read_text())
        assert config["model_type"] == kind and "vision_config" in config
        model, again = (cls.from_pretrained(folder, dtype=torch.bfloat16) for folder in (tmp_path / "hf", back))
        tokens = make_ids(2, 24)[:, :-1] % 90 + 3
        with torch.no_grad():
            assert again(tokens).logits.equal(model(tokens).logits)

    def test_a_run_keeps_them(self, tmp_path, kind, in_memory):
        with_images(kind, tmp_path / "hf", in_memory=in_memory)
        before = tensors_of(tmp_path / "hf")
        _, back, _ = begin(tmp_path / "first", 2, load_hf=f"{tmp_path}/hf", bf16=True)
        after = tensors_of(back)
        assert after.keys() == before.keys()
        changed = {key for key, tensor in before.items() if not after[key].equal(tensor)}
        assert changed and not any("vision" in key or "projector" in key for key in changed)


def test_a_converted_model_keeps_them_and_the_files_beside(tmp_path):
    with_images("llava", tmp_path / "hf")
    for words in (
        ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"],
        ["--loader", "megatron", "--saver", "hf", "--load-dir", f"{tmp_path}/ours", "--save-dir", f"{tmp_path}/back"],
    ):
        assert convert.main(words) == 0
    verify(CheckpointSource(tmp_path / "ours/iter_0000000").path)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    assert (tmp_path / "back/preprocessor_config.json").is_file()


def test_another_format_drops_them_in_one_line(tmp_path, capsys):
    with_images("llava", tmp_path / "hf")
    words = ["--loader", "hf", "--saver", "mcore", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/theirs"]
    assert convert.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "dropped" in line]
    assert len(lines) == 1 and "Megatron-LM has no place for them" in lines[0]


def test_with_more_tokens_the_language_model_is_written_alone(tmp_path, caplog):
    with_images("llava", tmp_path / "hf")
    with caplog.at_level("WARNING"):
        _, back, _ = begin(tmp_path, load_hf=f"{tmp_path}/hf", bf16=True, vocab_size=100, given=("vocab_size",))
    assert "are dropped: a folder of llama does not hold them" in caplog.text
    config = json.loads((back / "config.json").read_text())
    assert config["model_type"] == "llama" and config["vocab_size"] == 100
    assert not any("vision" in key for key in tensors_of(back))


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_layers_for_prediction_that_a_run_does_not_train(tmp_path, trained):
    """Those behind the trained ones come back as they were, beside copies of the embedding and the head."""
    layers = with_predictions("deepseek v3", tmp_path / "hf", 2)
    before, first = tensors_of(tmp_path / "hf"), layers + trained
    _, untouched, _ = begin(tmp_path / "first", load_hf=f"{tmp_path}/hf", mtp_num_layers=trained)
    assert_same(tensors_of(untouched), before)
    assert json.loads((untouched / "config.json").read_text())["num_nextn_predict_layers"] == 2
    _, back, path = begin(tmp_path / "second", 2, load_hf=f"{tmp_path}/hf", mtp_num_layers=trained)
    after = tensors_of(back)
    assert after.keys() == before.keys()
    for depth in range(trained, 2):
        theirs = f"model.layers.{layers + depth}."
        copies = {"embed_tokens.weight": "model.embed_tokens", "shared_head.head.weight": "lm_head"}
        for copy, original in copies.items():
            assert after[theirs + copy].equal(after[f"{original}.weight"])
            assert not after[theirs + copy].equal(before[theirs + copy])
        kept = [key for key in before if key.startswith(theirs) and key.removeprefix(theirs) not in copies]
        assert len(kept) > 10 and all(after[key].equal(before[key]) for key in kept)
    assert set(CheckpointSource(path).carried.tensors) == {
        key
        for key in before
        if key.startswith(tuple(f"model.layers.{layer}." for layer in range(first, layers + 2)))
        and not key.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }
    HFSource(back).check_copies()


@pytest.mark.parametrize("trained", [0, 1])
def test_layers_for_prediction_of_a_converted_model(tmp_path, trained):
    """There they are weights, and a run that does not train them keeps them all the same."""
    with_predictions("deepseek v3", tmp_path / "hf", 2, torch.bfloat16)
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 0
    model = vars(CheckpointSource(tmp_path / "ours/iter_0000000").model) | {"mtp_num_layers": trained}
    _, back, path = begin(tmp_path / "first", **model | DROPOUT, load=f"{tmp_path}/ours")
    assert_same(tensors_of(back), tensors_of(tmp_path / "hf"))
    config = json.loads((back / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2 and config["model_type"] == "deepseek_v3"
    again, back, _ = begin(tmp_path / "second", 1, **model | DROPOUT, load=f"{tmp_path}/first/run")
    assert again.carried.tensors.keys() == CheckpointSource(path).carried.tensors.keys()
    assert tensors_of(back).keys() == tensors_of(tmp_path / "hf").keys()


def test_layers_for_prediction_of_a_model_of_no_family_are_left_out(tmp_path):
    model = {**GPT, "mtp_num_layers": 1, "seq_length": 16, "position_embedding_type": "rope"}
    first = make_run(**model, save=f"{tmp_path}/run", save_interval=100)
    check(first, 1)
    path = save_checkpoint(build(first, pool.groups(), CPU))
    second = {**model, "mtp_num_layers": 0, "load": f"{tmp_path}/run", "finetune": True}
    trainer = build(make_run(**second, save=f"{tmp_path}/second", save_interval=100), pool.groups(), CPU)
    assert not trainer.carried.tensors and CheckpointSource(path).model.mtp_num_layers == 1


def test_a_run_goes_on_without_the_folder_it_began_with(tmp_path):
    """Each checkpoint has all of them; the ones before it may be deleted."""
    with_predictions("glm 4.7 flash", tmp_path / "hf", 1)
    before = tensors_of(tmp_path / "hf")
    trainer, _, path = begin(tmp_path, 1, load_hf=f"{tmp_path}/hf")
    shutil.rmtree(tmp_path / "hf")
    shutil.move(path, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", path)
    trainer.train_step()
    second = save_checkpoint(trainer)
    shutil.rmtree(path)
    trainer.train_step()
    save_checkpoint(trainer)
    fields = {name: value for name, value in vars(trainer.run.model).items() if name not in ("bf16", "fp16")}
    shutil.rmtree(second)
    _, back, _ = begin(tmp_path, 1, **fields, load=f"{tmp_path}/run")
    after = tensors_of(back)
    assert after.keys() == before.keys()
    assert all(after[key].equal(t) for key, t in before.items() if ".3." in key and "eh_proj" in key)


def test_unknown_names_are_still_refused(tmp_path):
    with_predictions("deepseek v3", tmp_path, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.gadget.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gadget\.weight among them"):
        HFSource(tmp_path)


def test_a_part_for_images_in_fp8_is_refused(tmp_path):
    with_images("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if "vision" in key and tensors[key].dim() == 2)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="of a part for images is in FP8"):
        HFSource(tmp_path).carried  # noqa: B018


@pytest.mark.parametrize("state", [{"prefix": ""}, {"config": {}, "prefix": "x."}, [], {"config": [], "prefix": ""}])
def test_a_state_that_no_checkpoint_has_is_refused(state):
    with pytest.raises(ValueError, match=r"carried|prefix"):
        check_carried_state(state)


def test_names_of_two_tensors_are_refused(tmp_path):
    with_images("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "config.json", model_type="llava")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is the name of two tensors"):
        HFSource(tmp_path)
