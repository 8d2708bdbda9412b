"""TRL's trainer with LoRA adapters, recorded and verified as Hugging Face's (nox -s hf)."""

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from det_callbacks import DivergenceError
from det_callbacks.huggingface import DeterminismCallback

pytestmark = [
    pytest.mark.usefixtures("environment_again"),  # which TrainingArguments sets
    pytest.mark.filterwarnings(
        # transformers' own
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:mtime may not be reliable:UserWarning",
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
    ),
]


@pytest.mark.slow
def test_trl_with_lora_matches_and_names_the_adapter_that_changed(tmp_path):
    words = {f"w{number}": number for number in range(30)} | {"<pad>": 30, "<eos>": 31}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(30, (12,), generator=generator).tolist() for _ in range(16)]

    def train(callback: DeterminismCallback, *others: TrainerCallback, resume: str | None = None) -> None:
        torch.manual_seed(11)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        args = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=2,
            learning_rate=1e-2,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        adapters = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        data = Dataset.from_dict({"input_ids": rows})
        options: dict[str, Any] = {"processing_class": tokenizer, "peft_config": adapters}
        trl.SFTTrainer(model, args, train_dataset=data, callbacks=[*others, callback], **options).train(
            resume_from_checkpoint=resume
        )

    train(DeterminismCallback(tmp_path / "run", mode="record"))
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        callback = DeterminismCallback(tmp_path / "run")
        train(callback, resume=resume)
        assert callback.verdict.verdict == "match"
        assert callback.verdict.counts.steps_compared == (4 if resume is None else 2)

    class Scales(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                weights = dict(kwargs["model"].named_parameters())
                next(weights[name] for name in weights if "layers.1" in name and "lora_B" in name).grad.mul_(2)

    with pytest.raises(DivergenceError) as caught:
        train(DeterminismCallback(tmp_path / "run"), Scales())
    first = caught.value.verdict.first_divergence
    assert first.step == 1
    assert "layers.1.self_attn.q_proj.lora_B" in str(first.name)
