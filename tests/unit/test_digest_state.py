"""digest_state: which weights these are, by name."""

import copy
import pickle

import pytest
import torch
from torch import nn

from det_callbacks import DetCallbacksError, digest_state, digest_tensor
from det_callbacks.host_digest import format_digest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_a_module_has_its_state_dicts_names_and_what_is_not_persistent():
    net = Net()
    found = digest_state(net)
    assert set(found.tensors) == {*net.state_dict(), "mask"}
    weight = format_digest(digest_tensor(net.first.weight))
    assert found.tensors["first.weight"] == found.tensors["again.weight"] == weight
    assert found.layouts["first.weight"] == "float32 [4, 3]"
    assert found.differing(digest_state(net.state_dict())) == ("mask",)
    net.mask = None
    assert digest_state(net) == digest_state(net.state_dict())


def test_a_flipped_bit_and_what_one_side_lacks_are_named_and_the_order_is_no_difference():
    net = Net()
    other = copy.deepcopy(net)
    found = digest_state(net)
    assert pickle.loads(pickle.dumps(found)) == found == digest_state(other) != digest_state({})
    other.second.weight.data.view(torch.int32)[1, 2] ^= 1
    changed = digest_state(other)
    assert found.digest != changed.digest
    assert found.differing(changed) == changed.differing(found) == ("second.weight",)
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert digest_state(tensors) == digest_state(dict(reversed(tensors.items())))
    assert digest_state(tensors).differing(digest_state({"b": tensors["b"], "c": tensors["a"]})) == ("a", "c")
    zeros = (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), 0, 0.0, False, 2, torch.tensor(0))
    assert len({digest_state({"a": value}) for value in zeros}) == len(zeros)


def test_an_optimizers_state_has_names_and_numbers():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = digest_state(optimizer.state_dict())
    assert {"state.0.exp_avg", "state.1.exp_avg_sq", "param_groups.0.betas.1"} <= before.tensors.keys()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.state[net.bias]["exp_avg"][0] += 1
    assert digest_state(optimizer.state_dict()).differing(before) == ("state.1.exp_avg", "param_groups.0.lr")


DEEP: dict[str, object] = {"x": torch.ones(1)}
for _ in range(30):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"net.weight": torch.empty(2, device="meta")}, TypeError, r"net\.weight: "),
        (torch.ones(2), TypeError, "takes a module or a mapping such as a state_dict; got Tensor"),
        ({"a": {"b": 1}, "a.b": 2}, DetCallbacksError, r"'a\.b'"),
        (DEEP, DetCallbacksError, "more than 20 levels"),
    ],
)
def test_what_cannot_be_digested_is_named(state, error, message):
    with pytest.raises(error, match=message):
        digest_state(state)
