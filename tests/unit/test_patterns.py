import pytest

from det_callbacks.errors import SettingsError
from det_callbacks.patterns import PHASES, OpPattern

PUT = "aten.put_.default"


@pytest.mark.parametrize(
    "text", ["", " ", "kthvalue", "decoder:", "backward/", "backward/decoder:", "decoder:put_", "aten", "a/b:c"]
)
def test_a_text_without_an_op_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        OpPattern.parse(text)
    assert repr(text) in str(refused.value)
    assert "write [phase/][module:]op with the op as namespace.op.overload" in str(refused.value)


@pytest.mark.parametrize("phase", ["bakward", "", "Forward"])
def test_a_phase_there_is_not_is_refused_with_those_there_are(phase: str) -> None:
    with pytest.raises(SettingsError, match="the phases are forward, backward, gradient, optimizer, other"):
        OpPattern.parse(f"{phase}/{PUT}")


@pytest.mark.parametrize("module", ["", "net.0", "net.[0].what?*", "?"])
def test_the_pattern_of_one_place_means_no_other(module: str) -> None:
    pattern = OpPattern.parse(OpPattern.exactly("backward", module, PUT))
    assert pattern.matches("backward", module, PUT)
    for other in ("backward", "x" + module, PUT), ("forward", module, PUT), ("backward", module, "aten.put_.out"):
        assert not pattern.matches(*other)


@pytest.mark.parametrize(
    ("text", "phase", "module", "is_meant"),
    [
        (PUT, "backward", "", True),
        ("aten.put.default", "forward", "decoder", False),
        ("aten.put_*", "forward", "decoder", True),
        (f"decoder:{PUT}", "forward", "decoder", True),
        (f"decoder:{PUT}", "forward", "decoder.0", False),
        (f"decoder.*:{PUT}", "forward", "decoder.0", True),
        (f"decoder.*:{PUT}", "forward", "decoder", False),
        (f"decoder:{PUT}", "forward", "?", False),
        (f":{PUT}", "forward", "", True),
        (f":{PUT}", "forward", "decoder", False),
        (f"backward/{PUT}", "backward", "decoder", True),
        (f"backward/{PUT}", "forward", "decoder", False),
        ("backward/decoder.0:aten.put_.*", "backward", "decoder.0", True),
        ("backward/decoder.0:aten.put_.*", "backward", "decoder.1", False),
        *((f"{phase}/{PUT}", phase, "", True) for phase in PHASES),
        *((f"{phase}/{PUT}", "forward", "", True) for phase in ("for*", "[fb]*ward")),
        (f"Decoder:{PUT}", "forward", "decoder", False),
    ],
)
def test_which_places_are_meant(text: str, phase: str, module: str, is_meant: bool) -> None:
    assert OpPattern.parse(text).matches(phase, module, PUT) is is_meant
