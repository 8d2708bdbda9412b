import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_runs import append, create

from det_callbacks.compare.evidence import _find_source
from det_callbacks.digest.host import digest_memory, digest_rows
from det_callbacks.runs.evidence import EvidenceRow
from det_callbacks.runs.store import Run
from det_callbacks.trace.batches import samples_of


@given(
    nbytes=st.sampled_from([1, 3, 8, 255, 1023, 1024, 1025, 3000]),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_rows_have_the_digests_of_their_bytes(nbytes, num_rows, seed):
    rows = np.random.default_rng(seed).integers(0, 256, (num_rows, nbytes), dtype=np.uint8)
    assert digest_rows(rows.ctypes.data, num_rows, nbytes) == [
        digest_memory(row.ctypes.data, nbytes) for row in rows
    ]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 5), (300,)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex64], ids=str
)
def test_samples_do_not_depend_on_their_order_and_on_nothing_less(dtype, shape):
    size = torch.Size((6, *shape))
    samples = torch.arange(1, 1 + size.numel()).reshape(size).to(dtype)
    digest = samples_of(samples).digest
    assert samples_of(samples.flip(0)).digest == digest
    assert samples_of(samples.repeat(2, *[1] * len(shape))[::2]).digest != digest
    changed = samples.clone()
    changed.view(-1)[-1] = 0
    assert samples_of(changed).digest != digest


def test_a_sample_with_a_small_digest_is_in_the_sketch_of_nearly_every_batch_that_it_is_in():
    samples = torch.rand(2_000, 5, generator=torch.Generator().manual_seed(0))
    batches = samples.split(50)
    shuffled = samples[torch.randperm(2_000, generator=torch.Generator().manual_seed(1))].split(50)
    sketched = {digest for batch in batches for digest in samples_of(batch).sketch}
    found = [digest in sketched for batch in shuffled for digest in samples_of(batch).sketch[:2]]
    assert sum(found) >= 0.95 * len(found)
    assert not any(digest in sketched for digest in samples_of(samples[:50] + 1).sketch)


def test_labels_have_no_sketch_since_they_repeat():
    assert samples_of(torch.arange(50)).sketch == ()


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([1, 2, 3, 4], (1, True)),
        ([1, 2, 5, 6], (1, False)),  # in two of its batches
        ([1, 2, 5, 99], (1, False)),  # three of four are enough
        ([5, 6, 98, 99], None),
        ([97, 98, 99], None),
    ],
)
def test_samples_are_from_another_step_if_the_run_has_three_quarters_of_them(
    samples, found, tmp_path
):
    writer = create(tmp_path / "run")
    for step, batch in enumerate(([8, 9], [1, 2, 3, 4], [5, 6, 7, 8])):
        writer.put_evidence(
            [EvidenceRow(step, "", "sample", "batch[0]", value=value) for value in batch]
        )
    append(writer, range(3), complete=True)
    run = Run.open(tmp_path / "run")
    source = _find_source(run, 0, 0, 0, new_samples=samples, samples=samples)
    assert ((source.step, source.has_all) if source else None) == found
