"""Small programs of what is special in a training step on the CPU, forward and backward.

Ops that write, draw, keep workspaces or have their own layouts are here;
all others are in torch's operator database.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as torch's documentation names it
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def total_of(outputs: Any) -> Tensor | None:
    tensors = [out for out in tree_leaves(outputs) if isinstance(out, Tensor) and out.requires_grad]
    return (
        sum((out.abs().sum() for out in tensors[1:]), tensors[0].abs().sum()) if tensors else None
    )


def back(function: Callable[..., Any], *inputs: Tensor) -> None:
    leaves = [
        x.detach().clone().requires_grad_() if x.is_floating_point() or x.is_complex() else x
        for x in inputs
    ]
    total = total_of(function(*leaves))
    if total is not None:
        total.backward()


def module(layer: nn.Module, *inputs: Tensor) -> None:
    back(layer, *inputs)
    with torch.no_grad():
        layer.eval()(*inputs)


def layers() -> None:
    image, rows = torch.randn(4, 6, 5, 5), torch.randn(4, 6)
    for layer in (nn.PReLU(), nn.RReLU(), nn.Dropout(0.5), nn.BatchNorm1d(6)):
        module(layer, rows)
    for layer in (
        *(
            nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
            nn.MaxPool2d(2),
            nn.FractionalMaxPool2d(2, 3),
        ),
        *(
            nn.BatchNorm2d(6),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.GroupNorm(2, 6),
            nn.LayerNorm(5),
        ),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    ):
        module(layer, image)
        module(layer.train(), image.contiguous(memory_format=torch.channels_last))
    with torch.autocast("cpu", torch.bfloat16):
        module(nn.Conv2d(6, 6, 3), image)
    module(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)), image)
    torch.batch_norm_update_stats(image, torch.zeros(6), torch.ones(6), 0.1)
    back(
        lambda x: (
            x.split(2),
            x.chunk(2),
            x.unbind(),
            x[:, torch.tensor([0, 2])],
            x.sort()[0],
            x.cumsum(-1),
        ),
        rows,
    )


def in_place() -> None:
    x, index = torch.rand(4, 5), torch.tensor([0, 2])
    x.add_(1).mul_(2).exp_().log_().clamp_(0, 1).copy_(torch.rand(4, 5)).fill_(
        0.5
    ).zero_().uniform_().normal_()
    x.bernoulli_(0.5).exponential_().cauchy_().log_normal_().geometric_(0.5).random_(
        5
    ).masked_fill_(x > 2, 1.0)
    x.index_fill_(0, index, 0.5).squeeze_().t_().t_().index_add_(0, index, x[:2].clone())
    x.index_copy_(0, index, x[:2].clone()).index_put_((index,), x[:2].clone()).scatter_(
        0, index[:, None], 1.0
    )
    x.addcmul_(x, x).addcdiv_(x, x + 1).lerp_(x + 1, 0.5).tril_().fill_diagonal_(1.0)
    x[:, 1] = 2
    x[1:3] += 1
    out = torch.empty(4, 4)
    torch.mm(x, x.t(), out=out)
    torch.cat([x, x], out=torch.empty(8, 5))
    torch.eye(3), torch.arange(5), torch.linspace(0, 1, 4), torch.full((2,), 1.0)
    (
        torch.ones(3).multinomial(2),
        torch.randperm(5),
        torch.randint(5, (3,)),
        torch.normal(x.abs(), x.abs() + 1),
    )


def recurrences() -> None:
    x = torch.randn(5, 3, 4)
    for kind in (nn.LSTM, nn.GRU):
        module(kind(4, 6, num_layers=2, dropout=0.3, bidirectional=True), x)
    module(nn.LSTM(4, 6, proj_size=2), x)
    module(nn.RNN(4, 6, nonlinearity="relu", bias=False), x)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
    nn.utils.rnn.pad_packed_sequence(nn.LSTM(4, 6)(packed)[0])[0].sum().backward()
    with torch.backends.mkldnn.flags(enabled=False):
        module(nn.LSTM(4, 6), x)


def attention_and_losses() -> None:
    heads = [torch.randn(2, 2, 5, 8) for _ in range(3)]
    back(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2), *heads)
    module(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8))
    x, labels = torch.rand(4, 5), torch.tensor([0, 2, 4, 1])
    back(
        lambda a: (
            F.nll_loss(a, labels) + F.multi_margin_loss(a, labels) + F.mse_loss(a, a.detach() + 1)
        ),
        x,
    )
    back(
        lambda a: F.cross_entropy(
            a, labels, label_smoothing=0.1, ignore_index=2, weight=torch.rand(5)
        ),
        x,
    )
    back(lambda a: F.cross_entropy(a[:, :, None, None], labels[:, None, None]), x)
    back(lambda a: F.multilabel_margin_loss(a, torch.tensor([[0, 2, -1, -1, -1]] * 4)), x)
    logits, targets = torch.randn(8, 2, 5), torch.tensor([[1, 2, 3], [2, 3, 1]])
    back(
        lambda a: F.ctc_loss(
            a.log_softmax(-1), targets, torch.tensor([8, 6]), torch.tensor([3, 2])
        ),
        logits,
    )
    back(lambda a: F.ctc_loss(a.log_softmax(-1), targets, (8, 6), (3, 2)), logits)


def embeddings() -> None:
    ids, offsets = torch.tensor([0, 2, 2, 4, 1]), torch.tensor([0, 2, 2])
    for mode in ("sum", "mean", "max"):
        module(
            nn.EmbeddingBag(6, 4, mode=mode, padding_idx=2, include_last_offset=True), ids, offsets
        )
    back(lambda weights: nn.EmbeddingBag(6, 4, mode="sum")(ids, offsets, weights), torch.rand(5))
    nn.EmbeddingBag(6, 4, mode="sum", sparse=True)(ids, offsets).sum().backward()
    for options in (
        {},
        {"padding_idx": 2},
        {"max_norm": 1.0},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ):
        nn.Embedding(6, 4, **options)(ids).sum().backward()


def optimizers() -> None:
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    for kind, options in itertools.product(kinds, ({}, {"foreach": True}, {"fused": True})):
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]
        optimizer = kind(parameters, lr=0.01, **options)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        nn.utils.clip_grad_value_(parameters, 0.1)
    scaler = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.randn(3))
    scaled = torch.optim.AdamW([weight], fused=True)
    scaler.scale(weight.sum()).backward()
    scaler.step(scaled)
    scaler.update()
    tensors = [torch.rand(3), torch.rand(2, 2)]
    torch._foreach_exp_(tensors)
    (
        torch._foreach_add(tensors, 1.0),
        torch._foreach_mul(tensors, tensors),
        torch._foreach_norm(tensors),
    )
    torch._foreach_lerp_(tensors, [*map(torch.exp, tensors)], 0.5)
    torch._foreach_copy_(tensors, [*map(torch.exp, tensors)])
    (
        torch._foreach_addcdiv_(tensors, tensors, tensors, [0.1, 0.2]),
        torch._foreach_maximum_(tensors, 0.5),
    )


def sparse_quantised_and_complex() -> None:
    table = nn.Embedding(6, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([0, 2, 2])).sum().backward()
    optimizer.step()
    coo = torch.eye(4).to_sparse()
    back(lambda dense: torch.sparse.mm(coo, dense), torch.randn(4, 3))
    coo.coalesce().to_dense(), (coo + coo).to_dense(), (coo * 2).coalesce().values()
    torch.eye(4).to_sparse_csr() @ torch.randn(4, 3)
    observed = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    back(observed, torch.randn(3, 4))
    back(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), torch.randn(3, 4))
    quantised = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
    quantised.dequantize(), quantised.int_repr()
    x = torch.randn(4, 6)
    back(
        lambda a: (
            torch.view_as_complex(a.reshape(4, 3, 2)),
            torch.complex(a, a).conj() * 2,
            torch.polar(a, a),
        ),
        x,
    )
    back(
        lambda a: (a.real, a.imag, a.angle(), a.abs(), torch.view_as_real(a), a.conj() @ a.mT),
        x.to(torch.complex64),
    )


_ALL = (
    layers,
    in_place,
    recurrences,
    attention_and_losses,
    embeddings,
    optimizers,
    sparse_quantised_and_complex,
)
PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in _ALL}
