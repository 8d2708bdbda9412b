import pytest

from det_callbacks.errors import SettingsError
from det_callbacks.patterns import PHASES, OpPattern


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("aten.kthvalue.default", ("*", "*", "aten.kthvalue.default")),
        ("decoder.*:aten.put_.default", ("*", "decoder.*", "aten.put_.default")),
        ("backward/aten.put_.default", ("backward", "*", "aten.put_.default")),
        ("backward/decoder.0:aten.put_.*", ("backward", "decoder.0", "aten.put_.*")),
        ("*/*:*", ("*", "*", "*")),
        (":aten.put_.default", ("*", "", "aten.put_.default")),
    ],
)
def test_phase_and_module_may_be_left_out(text: str, parts: tuple[str, str, str]) -> None:
    pattern = OpPattern.parse(text)
    assert (pattern.phase, pattern.module, pattern.op) == parts


@pytest.mark.parametrize("phase", [*PHASES, "for*", "[fb]*ward"])
def test_every_phase_can_be_named(phase: str) -> None:
    assert OpPattern.parse(f"{phase}/aten.add.Tensor").phase == phase


@pytest.mark.parametrize(
    "text", ["", " ", "kthvalue", "decoder:", "backward/", "backward/decoder:", "decoder:put_", "aten", "a/b:c"]
)
def test_a_text_without_an_op_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        OpPattern.parse(text)
    assert repr(text) in str(refused.value)
    assert "write [phase/][module:]op with the op as namespace.op.overload" in str(refused.value)


@pytest.mark.parametrize("phase", ["bakward", "train", "", "Forward"])
def test_a_phase_there_is_not_is_refused_with_those_there_are(phase: str) -> None:
    with pytest.raises(SettingsError, match="the phases are forward, backward, gradient, optimizer, other"):
        OpPattern.parse(f"{phase}/aten.put_.default")


@pytest.mark.parametrize(
    ("text", "place", "is_meant"),
    [
        ("aten.put_.default", ("forward", "decoder", "aten.put_.default"), True),
        ("aten.put_.default", ("backward", "", "aten.put_.default"), True),
        ("aten.put_.default", ("forward", "decoder", "aten.put.default"), False),
        ("aten.put_*", ("forward", "decoder", "aten.put_.default"), True),
        ("decoder:aten.put_.default", ("forward", "decoder", "aten.put_.default"), True),
        ("decoder:aten.put_.default", ("forward", "decoder.0", "aten.put_.default"), False),
        ("decoder.*:aten.put_.default", ("forward", "decoder.0", "aten.put_.default"), True),
        ("decoder.*:aten.put_.default", ("forward", "decoder", "aten.put_.default"), False),
        ("decoder:aten.put_.default", ("forward", "?", "aten.put_.default"), False),
        (":aten.put_.default", ("forward", "", "aten.put_.default"), True),
        (":aten.put_.default", ("forward", "decoder", "aten.put_.default"), False),
        ("backward/aten.put_.default", ("backward", "decoder", "aten.put_.default"), True),
        ("backward/aten.put_.default", ("forward", "decoder", "aten.put_.default"), False),
        ("Decoder:aten.put_.default", ("forward", "decoder", "aten.put_.default"), False),
    ],
)
def test_which_places_are_meant(text: str, place: tuple[str, str, str], is_meant: bool) -> None:
    assert OpPattern.parse(text).matches(*place) is is_meant
