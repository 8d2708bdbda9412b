import pytest
import yaml

from det_callbacks.audit import AuditFinding, AuditReport, replay_list
from det_callbacks.patterns import OpPattern
from det_callbacks.tensors.replay import replay_patterns

ODD = "net.[0].what?*"


def finding(**changes):
    place = {"phase": "backward", "module": "net.0", "op": "aten.index_add_.default", "source": ()}
    what = {"shape": (2,), "dtype": "float32", "num_elements": 2, "num_differing": 1, "max_ulps": 3}
    place |= {"occurrence": 0, "output": 0, "is_transient": False}
    return AuditFinding(
        **{"judgement": "nondeterministic", "steps": (1, 2), "num_places": 2, **place, **what, **changes}
    )


@pytest.mark.parametrize("module", ["", "net.0", ODD, "?"])
def test_a_pattern_means_its_op_and_no_other(module):
    pattern = OpPattern.parse(finding(module=module).pattern)
    assert pattern.matches("backward", module, "aten.index_add_.default")
    for other in ("backward", "x" + module, "aten.index_add_.default"), ("forward", module, "aten.index_add_.default"):
        assert not pattern.matches(*other)
    assert not pattern.matches("backward", module, "aten.index_add_.out")


def test_the_list_is_yaml_that_replay_takes(tmp_path):
    odd = {"judgement": "transient", "module": "a"}, {"module": ODD}, {"module": "it's"}
    report = AuditReport(
        steps=(0, 1, 2), num_compared=10, skipped={}, findings=(finding(), *(finding(**one) for one in odd))
    )
    patterns = report.replay
    assert patterns[0] == "backward/net.0:aten.index_add_.default"
    assert len(patterns) == 3, "a transient fault is not replayed"
    path = tmp_path / "replay.yaml"
    path.write_text(replay_list(patterns, ("found: by an audit", "- not an entry")))
    assert yaml.safe_load(path.read_text()) == list(patterns)
    assert replay_patterns(path) == patterns
    path.write_text(replay_list(()))
    assert replay_patterns(str(path)) == ()
