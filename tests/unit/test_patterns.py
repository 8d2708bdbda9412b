import itertools
import re

import pytest

from det_callbacks.errors import SettingsError
from det_callbacks.runs.selection import ALL_PHASES, OpPattern

PUT = "aten.put_.default"


@pytest.mark.parametrize(
    "text", ["", "put_", "net:put_", *(f"{phase}/{PUT}" for phase in ("bakward", "", "Forward"))]
)
def test_what_is_no_pattern_is_refused_with_the_form_or_the_phases(text):
    says = (
        "the phases are forward, backward, "
        if "/" in text
        else "write [phase/][module:]op with the op as namespace."
    )
    with pytest.raises(SettingsError, match=f"{re.escape(repr(text))}.*{re.escape(says)}"):
        OpPattern.parse(text)


@pytest.mark.parametrize(
    "module", ["", "net.0", "net.[0].what?*", "?", "net.a/b", "net.a:b", "it's [0]"]
)
def test_the_pattern_of_one_place_means_no_other(module):
    pattern = OpPattern.parse(OpPattern.exactly("backward", module, PUT))
    places = itertools.product(
        ("backward", "forward"), (module, "x" + module), (PUT, "aten.put_.out")
    )
    assert [place for place in places if pattern.matches(*place)] == [("backward", module, PUT)]


@pytest.mark.parametrize(
    ("text", "phase", "module", "is_meant"),
    [
        ("aten.put.default", "forward", "decoder", False),
        ("aten.put_*", "forward", "decoder", True),
        (f"decoder:{PUT}", "forward", "decoder", True),
        (f"decoder:{PUT}", "forward", "decoder.0", False),
        (f"decoder.*:{PUT}", "forward", "decoder.0", True),
        (f"decoder.*:{PUT}", "forward", "decoder", False),
        *((f":{PUT}", "forward", module, not module) for module in ("", "decoder")),
        (f"backward/{PUT}", "backward", "decoder", True),
        (f"backward/{PUT}", "forward", "decoder", False),
        *((f"{phase}/{PUT}", phase, "", True) for phase in ALL_PHASES),
        *((f"{phase}/{PUT}", "forward", "", True) for phase in ("for*", "[fb]*ward")),
        (f"Decoder:{PUT}", "forward", "decoder", False),
    ],
)
def test_which_places_are_meant(text, phase, module, is_meant):
    assert OpPattern.parse(text).matches(phase, module, PUT) is is_meant
