"""Models of transformers outside its Trainer: batch invariance,
and a rollout against the training pass.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'det_callbacks[hf]'"
)

from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from det_callbacks import check_batch_invariance, compare_modules

# transformers' own
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_rollout_differs_from_the_training_pass_by_rounding_only():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "rollout.md").read_text()
    names: dict[str, Any] = {}
    for example in re.findall(r"(?s)```python\n(.*?)```", page):
        exec(example, names)
    report = names["report"]
    of_modules = [one for one in report.comparisons if one.phase == "module"]
    assert {(one.base, one.control) for one in of_modules if one.name == "model.lm_head"} == {
        ("float32 [2, 24, 256]", "float32 [2, 24, 256]")
    }
    assert len(of_modules) > 50
    assert report.close

    class Lagging(names["Training"]):
        def forward(self, tokens: Tensor) -> Tensor:
            first = self.model(tokens[:, :8], use_cache=True)
            places = torch.arange(7, 23)[None]  # instead of 8 to 23
            rest = self.model(
                tokens[:, 8:], past_key_values=first.past_key_values, position_ids=places
            )
            return names["log_probabilities"](torch.cat([first.logits, rest.logits], 1), tokens)

    model, tokens = names["model"], names["tokens"]
    wrong = compare_modules(
        names["Training"](model),
        Lagging(model),
        tokens,
        iterations=1,
        join=1,
        loss=lambda output: None,
    )
    assert (wrong.close, wrong.first.name) == (False, "model.model.rotary_emb[0]")


def test_the_batch_invariance_of_a_model_with_attention_masks():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes)).eval()
    tokens = torch.randint(1, 99, (6, 10))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = mask[4, 5:] = 0
    report = check_batch_invariance(
        model, BatchEncoding({"input_ids": tokens, "attention_mask": mask})
    )
    with torch.no_grad():
        whole = model(input_ids=tokens, attention_mask=mask).logits
        parts = [
            torch.cat(
                [
                    model(
                        input_ids=tokens[at : at + size].clone(),
                        attention_mask=mask[at : at + size].clone(),
                    ).logits
                    for at in range(0, 6, size)
                ]
            )
            for size in report.sizes
        ]
    assert report.invariant is all(torch.equal(whole, part) for part in parts), str(report)
    assert report.num_compared > 60
    assert all(one.kind == "rounding" for one in report.ops)
    model.model.norm.register_forward_hook(lambda module, given, output: output - output.mean(0))
    report = check_batch_invariance(model, {"input_ids": tokens, "attention_mask": mask})
    (mixing,) = [one for one in report.ops if one.kind == "mixing" and one.begins is not False]
    assert mixing.op == "aten.sub.Tensor"
