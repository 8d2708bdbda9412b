"""What of a checkpoint is named, and what counts as the same."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from det_callbacks import check_checkpoint
from det_callbacks.checkpoint.entries import MAX_FLAT, Entry, encode_plain, entries_of
from det_callbacks.digest import digest_tensor, format_digest


class Thing:
    pass


def test_entries_have_the_names_of_their_keys() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    found = entries_of(
        {
            "epoch": 3,
            "state_dict": OrderedDict({"net.weight": weight, "a/b": weight.t()}),
            "optimizer_states": [{"state": {0: {"exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
            "empty": {},
            "hyper_parameters": {"thing": Thing(), "0": 1, 0: 2},
        },
        parameters={"0/state/0": "net.weight"},
    )
    assert found["state_dict"]["net.weight"] == Entry(
        kind="tensor", type="float32", digest=format_digest(digest_tensor(weight)), shape=(2, 3)
    )
    assert found["state_dict"]["a~1b"].shape == (3, 2)
    assert found["optimizer_states"]["0/state/0/exp_avg"].parameter == "net.weight"
    assert found["optimizer_states"]["0/param_groups/0/params"].type == "list"
    assert found["hyper_parameters"]["thing"] == Entry(kind="opaque", type="Thing")
    assert found["hyper_parameters"]["'0'"] != found["hyper_parameters"]["0"]
    assert list(found["epoch"]) == list(found["empty"]) == [""]


def test_containers_that_hold_themselves_end() -> None:
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    table: dict[str, Any] = {}
    table["self"] = table
    found = entries_of({"loop": loop, "table": table})
    assert found["loop"]["1"].kind == found["table"]["self"].kind == "opaque"


def test_a_large_table_is_one_entry_and_a_large_state_is_not() -> None:
    table = {str(index): index for index in range(MAX_FLAT + 1)}
    state = {str(index): torch.zeros(1) for index in range(MAX_FLAT + 1)}
    found = entries_of({"table": table, "state": state})
    assert (len(found["table"]), len(found["state"])) == (1, MAX_FLAT + 1)


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.nn.parameter.UninitializedParameter()])
def test_a_tensor_without_data_is_opaque(tensor: torch.Tensor) -> None:
    found = entries_of({"state_dict": {"a": tensor, "b": torch.ones(2)}})["state_dict"]
    assert found["a"].kind == "opaque"
    assert found["b"].digest == format_digest(digest_tensor(torch.ones(2)))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0.0, -0.0), ("", b""), ([], ()), (["a", "b"], ["ab"]), ({"a": 1}, {"a": 1.0}), (None, "N")],
)
def test_what_python_takes_for_equal_or_alike_is_told_apart(one: Any, other: Any) -> None:
    assert encode_plain(one) != encode_plain(other)


def test_values_that_are_not_plain_have_no_encoding() -> None:
    assert encode_plain([1, {"a": Thing()}]) is None
    assert encode_plain({1, 2, 3}) == encode_plain({3, 2, 1})


def compare(folder: Path, reference: dict[str, Any], current: dict[str, Any]) -> list[Any]:
    paths = folder / "reference.ckpt", folder / "current.ckpt"
    for path, checkpoint in zip(paths, (reference, current), strict=True):
        torch.save(checkpoint, path)
    return list(check_checkpoint(*paths).entries)


def test_exchanged_tensors_are_said_to_be(tmp_path: Path) -> None:
    one, other = torch.ones(2), torch.zeros(2)
    found = compare(tmp_path, {"state_dict": {"a": one, "b": other}}, {"state_dict": {"a": other, "b": one}})
    assert [(entry.path, entry.exchanged_with) for entry in found] == [("a", "b"), ("b", "a")]
    found = compare(tmp_path, {"state_dict": {"a": one, "b": other}}, {"state_dict": {"a": other, "b": other + 2}})
    assert [entry.exchanged_with for entry in found] == [None, None]
