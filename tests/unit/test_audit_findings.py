import json

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


def report(*findings):
    return AuditReport(steps=(0, 1, 2), num_compared=10, skipped={"view": 3}, findings=findings)


@pytest.mark.parametrize("module", ["", "net.0", ODD, "?"])
def test_a_pattern_means_its_op_and_no_other(module):
    pattern = OpPattern.parse(finding(module=module).pattern)
    assert pattern.matches("backward", module, "aten.index_add_.default")
    for other in ("backward", "x" + module, "aten.index_add_.default"), ("forward", module, "aten.index_add_.default"):
        assert not pattern.matches(*other)
    assert not pattern.matches("backward", module, "aten.index_add_.out")


def test_only_nondeterministic_ops_are_replayed():
    findings = [finding(), finding(judgement="transient", module="a")]
    assert report(*findings).replay == ("backward/net.0:aten.index_add_.default",)


def test_the_list_is_yaml_that_replay_takes(tmp_path):
    patterns = report(finding(), finding(module=ODD), finding(module="it's")).replay
    path = tmp_path / "replay.yaml"
    path.write_text(replay_list(patterns, ("found: by an audit", "- not an entry")))
    assert yaml.safe_load(path.read_text()) == list(patterns)
    assert replay_patterns(path) == patterns
    path.write_text(replay_list(()))
    assert replay_patterns(str(path)) == ()


def test_the_report_is_plain_data():
    content = report(finding(source=("train.py:4 in forward",))).to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["findings"][0]["source"] == ["train.py:4 in forward"]
    assert content["replay"] == ["backward/net.0:aten.index_add_.default"]
    assert set(content["findings"][0]) == set(AuditFinding.__dataclass_fields__)
