"""Checkpoints that are folders: every process digests the files that it wrote, and none waits for another.

Rank 0 writes ``X.ckpt.digests.json``, rank r the file ``X.ckpt.digests/rank-0000r.json``. torch's distributed
checkpoints name a file of rank r ``__r_n.distcp``; everything else is rank 0's. Each rank is told when all have written
(the saving itself ends with a collective of torch's), so no file changes any more.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from det_callbacks.checkpoint.difference import EntryDifference
from det_callbacks.checkpoint.entries import Entry
from det_callbacks.checkpoint.files import RANKS, Place
from det_callbacks.checkpoint.reading import Found
from det_callbacks.checkpoint.saving import put_sidecar
from det_callbacks.checkpoint.sidecar import FileDigest, SaveContext, Sidecar
from det_callbacks.digest import format_digest

_RANK_FILE = re.compile(r"__(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFolder:
    """What the files of a folder were compared to be.

    Attributes:
        differences: files that differ, are missing or are not known.
        num_files: compared.
        num_bytes: of them.
    """

    differences: list[EntryDifference]
    num_files: int
    num_bytes: int


def save_folder(
    place: Place,
    *,
    id: str,
    rank: int,
    num_ranks: int,
    entries: Mapping[str, Mapping[str, Entry]],
    context: SaveContext,
) -> None:
    """Write this rank's sidecar of a folder whose files are there.

    Args:
        place: the folder.
        id: of the save.
        rank: of this process.
        num_ranks: that wrote.
        entries: of this rank: its shards of tensors.
        context: when it was saved; attachments are kept by rank 0 only.
    """
    own = [name for name in place.files() if _writer(name, num_ranks) == rank]
    sidecar = Sidecar(
        id=id,
        file=None,
        files={name: place.inside(name).digest() for name in own},
        num_ranks=num_ranks,
        entries=entries,
        context=context,
    )
    if rank == 0:
        put_sidecar(place, sidecar, context.attachments)
        return
    target = _rank_sidecar(place, rank)
    target.make_parent()
    temporary = target.beside(".next")
    temporary.write(sidecar.to_bytes())
    temporary.rename(target)


def check_folder(place: Place, found: Found) -> CheckedFolder:
    """Compare the files of a folder with what the ranks say of them; reads them all once.

    Args:
        place: the folder.
        found: the sidecar of rank 0.

    Raises:
        CheckpointFormatError: a rank's sidecar is damaged.
    """
    main = found.sidecar
    expected: dict[str, FileDigest] = dict(main.files)
    differences = [] if main.file is None else [_difference("", "structure", main.file, None)]
    for rank in range(1, main.num_ranks):
        place_of_rank = _rank_sidecar(place, rank)
        raw = place_of_rank.read()
        if raw is None:
            differences.append(_difference(f"digests of rank {rank}", "missing", None, None))
            continue
        expected |= Sidecar.from_bytes(raw, place_of_rank.shown).files
    present = {name: place.inside(name).digest() for name in place.files()}
    for name, digest in expected.items():
        if name not in present:
            differences.append(_difference(name, "missing", digest, None))
        elif present[name] != digest:
            differences.append(_difference(name, "content", digest, present[name]))
    differences += [
        _difference(name, "extra", None, digest) for name, digest in present.items() if name not in expected
    ]
    num_bytes = sum(digest.size for digest in present.values())
    return CheckedFolder(differences=differences, num_files=len(expected), num_bytes=num_bytes)


def _rank_sidecar(place: Place, rank: int) -> Place:
    return place.beside(RANKS).inside(f"rank-{rank:05d}.json")


def _writer(name: str, num_ranks: int) -> int:
    match = _RANK_FILE.match(name)
    rank = int(match.group(1)) if match else 0
    return rank if rank < num_ranks else 0


def _difference(path: str, kind: str, reference: FileDigest | None, current: FileDigest | None) -> EntryDifference:
    return EntryDifference(section="files", path=path, kind=kind, reference=_shown(reference), current=_shown(current))


def _shown(digest: FileDigest | None) -> str | None:
    return None if digest is None else format_digest(digest.digest)
