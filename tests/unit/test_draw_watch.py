import gc
import weakref

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks.callback.draw_watch import DrawWatch


def test_an_iterator_that_is_let_go_is_gone_at_once():
    """Its workers end with it: one that waits for the garbage collector keeps them."""
    watch = DrawWatch(lambda point: None, lambda name, text: None)
    loader = DataLoader(TensorDataset(torch.arange(8)), 2)
    combined = CombinedLoader(loader, "max_size_cycle")
    watch.attach(combined)
    followed = iter(loader)
    assert [batch[0].tolist() for batch in followed] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    alive = weakref.ref(followed)
    gc.disable()
    try:
        del followed
        assert alive() is None
    finally:
        gc.enable()
        watch.detach()
    assert "_get_iterator" not in vars(loader)


def test_the_batch_that_is_trained_on_is_told_from_those_that_wait():
    watch = DrawWatch(lambda point: None, lambda name, text: None)
    combined = CombinedLoader(DataLoader(TensorDataset(torch.arange(8)), 2), "max_size_cycle")
    watch.attach(combined)
    iter(combined)
    next(combined)
    next(combined)
    now, waiting = watch.current(1), watch.current(0)
    assert now is not None
    assert waiting is not None
    assert (now.indices, waiting.indices) == ({"train_dataloader": [0, 1]}, {"train_dataloader": [2, 3]})
    assert watch.current(2) is None
    watch.detach()
