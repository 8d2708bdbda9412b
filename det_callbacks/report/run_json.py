"""A run and its steps as JSON-able data, for ``det-callbacks show --json``."""

from dataclasses import asdict
from typing import Any

from det_callbacks.host_digest import format_digest
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.program import StepRecord, StepView
from det_callbacks.runs.store import RankRun, Run


def run_to_dict(run: Run, rank: RankRun) -> dict[str, Any]:
    """Return what a run holds: identity, selection, and a row for each step of a rank."""
    return {
        "schema": 1,
        "path": str(run.path),
        "run_id": run.run_id,
        "complete": run.is_complete,
        "incomplete_reason": run.incomplete_reason,
        "keeps": run.keeps,
        "world_size": run.world_size,
        "rank": rank.rank,
        "selection": run.manifest.get("selection"),
        "attempts": len(run.manifest["attempts"]),
        "resumed_from": [{"segment": segment, "step": step} for segment, step in sorted(run.resumed_steps)],
        "replay": list(run.manifest.get("replay", ())),
        "keep_tensors": list(run.manifest.get("keep_tensors", ())),
        "metrics": [
            {"segment": segment, **asdict(reading)}
            for segment in run.segments
            for reading in read_metrics(run, segment).by_key.values()
        ],
        "steps": [_record_to_dict(record) for record in rank.iterate()],
    }


def step_to_dict(view: StepView) -> dict[str, Any]:
    """Return one step: its record and a row for each site."""
    rows = zip(view.program.sites, view.layout.entries, view.record.digests, strict=True)
    return {
        "schema": 1,
        "rank": view.rank,
        **_record_to_dict(view.record),
        "ops_seen": view.program.ops_seen,
        "ops_digested": view.program.ops_digested,
        "ops_skipped": dict(view.program.ops_skipped),
        "sites": [
            {
                "position": position,
                "phase": site.phase,
                "module": site.module,
                "op": site.op,
                "occurrence": site.occurrence,
                "output": site.output,
                "role": site.role,
                "name": site.name,
                "shape": None if entry is None else list(entry.shape),
                "dtype": None if entry is None else entry.dtype,
                "digest": format_digest(int(digest)),
                "inputs": list(site.inputs),
                "arguments": site.arguments,
                "varying": list(site.varying),
                "recomputed": site.recomputed,
                "source": list(site.source),
            }
            for position, (site, entry, digest) in enumerate(rows)
        ],
    }


def _record_to_dict(record: StepRecord) -> dict[str, Any]:
    return {
        "segment": record.segment,
        "step": record.step,
        "epoch": record.epoch,
        "program": format_digest(record.program_id),
        "layout": format_digest(record.layout_id),
        "chain": format_digest(record.chain),
        "num_sites": len(record.digests),
    }
