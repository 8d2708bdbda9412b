"""What a printed verdict says, and how much of it: the origins that are alike,
choices, and changed code.
"""

from dataclasses import replace

import pytest
from step_builder import StepBuilder, both, judge, training_step
from verdicts import DIVERGED, DIVERGENCE

from det_callbacks.causes.sentences import what_differs
from det_callbacks.report.verdict import details_report, headline, next_lines, verdict_lines
from det_callbacks.runs.manifest import AS_COMMITTED
from det_callbacks.runs.program import TensorLayout
from det_callbacks.text import listed
from det_callbacks.verdict import EnvironmentDifference, Verdict


def differing(
    name: str, reference: object, current: object, *, changes_bits: bool = False
) -> EnvironmentDifference:
    return EnvironmentDifference(
        name=name, reference=reference, current=current, changes_bits=changes_bits, is_machine=False
    )


def updated(step: StepBuilder, now: bool) -> None:
    for number in range(40):
        step.op(
            "aten.add_.Tensor",
            f"w{number}",
            phase="optimizer",
            name=f"w{number}",
            varying={"alpha": -0.1 - now},
        )


def test_origins_that_are_alike_have_one_row_in_the_text_and_a_row_each_in_json_and_page(tmp_path):
    verdict = judge(tmp_path, both(updated))
    section = verdict_lines(verdict).split("Origins (")[1].split("\n\n")[0]
    heading, *row = section.splitlines()[1:]
    assert len(row) < 4, section
    assert (heading.split()[-1], row[0].split()[-1]) == ("more", "39")
    assert len(verdict.to_dict()["origins"]) == 40
    (table,) = [
        one.table
        for one in details_report(verdict, lists_all=True)
        if one.title.startswith("Origins")
    ]
    assert len(table.rows) == 40
    other = replace(DIVERGENCE, op="aten.mul.Tensor")
    text = verdict_lines(replace(DIVERGED, origins=(DIVERGENCE, other)))
    assert ("  more\n" in text, "aten.mul.Tensor#0" in text) == (False, True)


def test_what_to_record_next_is_printed_for_python_and_for_the_command_line():
    arguments = {"level": "op", "only_steps": [3], "compiled": "eager"}
    lines = verdict_lines(replace(DIVERGED, record_next=arguments))
    assert 'in Python  level="op", only_steps=[3], compiled="eager"' in lines
    assert "on the command line  --level=op --only-steps=3 --compiled=eager" in lines


CHANGED, COMMIT, NOTES = "code.file.models/net.py", "code.git_commit", "code.file.NOTES.md"
OLD, NEW = "0" * 40, "1" * 40


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            [differing(CHANGED, AS_COMMITTED, "12")],
            "models/net.py changed since the reference was recorded.",
        ),
        (
            [differing(CHANGED, "ab", None)],
            "models/net.py changed since the reference was recorded.",
        ),
        (
            [differing(COMMIT, OLD, NEW)],
            "The commit differs: 000000000 in the reference, 111111111 in the",
        ),
        # which may be the change that was committed meanwhile
        ([differing(COMMIT, OLD, NEW), differing(CHANGED, "ab", AS_COMMITTED)], "!models/net.py"),
        (
            [differing(COMMIT, OLD, NEW), differing(CHANGED, "ab", "12")],
            "models/net.py changed since",
        ),
        ([differing(COMMIT, None, NEW)], "!another commit"),
        ([differing(NOTES, "ab", "12")], "1 other file of the repository changed too"),
        ([differing(NOTES, "ab", "12")], "!NOTES.md"),
        (
            [differing(CHANGED, "ab", "12"), differing(NOTES, "ab", "12")],
            "models/net.py changed since the reference",
        ),
    ],
)
def test_code_that_changed_is_named_in_the_first_lines(environment, said, tmp_path):
    verdict = judge(tmp_path, (training_step(), training_step(noise_at=3)), environment=environment)
    assert (said.removeprefix("!") in verdict.explanation) is not said.startswith("!"), (
        verdict.explanation
    )
    assert verdict.explanation in " ".join(verdict_lines(verdict).split("\n\n")[0].split())
    same = judge(tmp_path, (training_step(), training_step()), environment=environment)
    assert (same.verdict, "since the reference" in same.explanation) == ("match", False)


def test_the_probability_of_a_dropout_is_that_to_keep(tmp_path):
    def fill(step, now):
        step.op("aten.bernoulli_.float", step.generators(5), varying={"p": 0.5 + now / 10})

    explanation = judge(tmp_path, both(fill)).explanation
    assert "(p: 0.5 -> 0.6; a dropout keeps an element with probability p)" in explanation


def test_whether_an_entry_can_change_bits_is_asked_of_the_machine_only():
    def row(*entries: EnvironmentDifference) -> list[str]:
        text = verdict_lines(replace(DIVERGED, environment=entries))
        return text.split("can change bits\n")[1].splitlines()[0].split()

    assert row(differing("config.model.optimizer.lr", 0.1, 0.2))[-2:] == ["choice", "-"]
    machine = replace(differing("torch.num_threads", 1, 2, changes_bits=True), is_machine=True)
    assert row(machine)[-2:] == ["machine", "yes"]
    assert row(replace(machine, changes_bits=False))[-2:] == ["machine", "no"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({}, "origin: its inputs match"),
        ({"is_origin": False}, "passed on: one of its inputs differs"),
        (
            {"is_origin": False, "op": "", "phase": "data", "name": "batch[0]"},
            "source: no recorded op caused this",
        ),
        (
            {"is_origin": False, "op": "", "phase": "rng", "name": "torch.cpu after the step"},
            "source: no recorded op caused this",
        ),
        (
            {"is_origin": False, "op": "", "phase": "gradient", "name": "grad of w"},
            "passed on: one of its inputs",
        ),
    ],
)
def test_a_source_is_told_from_what_passed_a_difference_on(place, said):
    verdict: Verdict = replace(DIVERGED, first_divergence=replace(DIVERGENCE, **place))
    assert said in verdict_lines(verdict)


def test_the_next_commands_quote_their_paths():
    verdict: Verdict = replace(DIVERGED, reference="my runs/a", current="b;c", record_next=None)
    shown = [f"det-callbacks show {path} --step 3" for path in ("'my runs/a'", "'b;c'")]
    assert next_lines(verdict) == shown


def test_the_headline_is_the_verdict_in_one_line(tmp_path):
    environment = [differing("optimizer.Adam.lr", 0.1, 0.2, changes_bits=True)]
    by_choice = judge(tmp_path, (training_step(), training_step(lr=0.2)), environment=environment)
    assert headline(by_choice) == "DIVERGED settings: optimizer.Adam.lr 0.1 -> 0.2 (step 7)"
    by_op = judge(tmp_path, (training_step(), training_step(noise_at=3)))
    assert headline(by_op) == "DIVERGED forward: aten.mul.Tensor in net.chain (step 7)"
    by_batch = judge(tmp_path, None, (training_step(), training_step(rows=(4, 3, 2, 1))))
    assert headline(by_batch) == "DIVERGED data_order: batch[0] (step 7 of rank 1)"
    whole = replace(DIVERGENCE, op="", module="", phase="other", kind="missing")
    by_step = replace(DIVERGED, first_divergence=whole, cause="structure")
    assert headline(by_step) == "DIVERGED structure: a step that is only in the reference (step 3)"


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        ("", {}, ""),
        ("a", {}, "a"),
        ("aab", {}, "a and b"),
        ("abc", {}, "a, b and c"),
        ("abcde", {}, "a, b, c and 2 more"),
        ("abc", {"separator": "; "}, "a; b; c"),
        ("abcd", {"separator": "; "}, "a; b; c and 1 more"),
        ("ab", {"separator": " or "}, "a or b"),
    ],
)
def test_a_sentence_lists_each_name_once_and_joins_the_last_with_and(names, options, text):
    assert listed(names, **options) == text


def test_the_parts_of_a_layout_that_differ_are_named():
    one = TensorLayout(dtype="float32", shape=(8, 4), stride=(4, 1))
    others = {
        "a different shape": replace(one, shape=(8, 3), stride=(3, 1)),
        "a different dtype": replace(one, dtype="bfloat16"),
        "a different shape and dtype": replace(one, dtype="bfloat16", shape=(4, 8), stride=(8, 1)),
        "different strides": replace(one, stride=(1, 8)),
        "a different layout": None,
    }
    for text, other in others.items():
        assert what_differs((one, other)) == text
