"""What processes compare before they train."""

import pytest

from det_callbacks.environment import capture_environment
from det_callbacks.errors import SettingsError
from det_callbacks.ranks import require_same, start_facts

FACTS = {"settings.cudnn_benchmark": False, "torch.version": "2.13", "weights": "00ff"}


def test_equal_facts_are_fine() -> None:
    require_same([FACTS] * 3)


def test_the_minority_is_named() -> None:
    others = {**FACTS, "torch.version": "2.12"}
    with pytest.raises(SettingsError) as caught:
        require_same([FACTS, FACTS, others, FACTS])
    assert 'torch.version is "2.12" on rank 2, and "2.13" on ranks 0, 1, 3' in str(caught.value)
    assert "2 other entries agree" in str(caught.value)
    assert caught.value.exit_code == 2


def test_of_two_rank_0_is_taken_for_right_and_a_missing_entry_differs() -> None:
    with pytest.raises(SettingsError, match='weights is null on rank 1, and "00ff" on rank 0'):
        require_same([FACTS, {name: value for name, value in FACTS.items() if name != "weights"}])


def test_only_some_are_named() -> None:
    rows = [{f"entry {number}": rank for number in range(9)} for rank in range(2)]
    with pytest.raises(SettingsError, match="; and 4 more"):
        require_same(rows)


def test_facts_hold_versions_and_settings_and_no_seed() -> None:
    environment = capture_environment(choices={"trainer": {"world_size": 2}}).to_dict()
    environment["settings.seed"] = {"value": 5, "is_machine": False, "changes_bits": True}
    facts = start_facts({"environment": environment, "selection": {"level": "op"}}, weights=None)
    assert {"torch.version", "python.version", "code.git_commit", "selection.level", "trainer.world_size"} <= set(facts)
    assert "settings.cudnn_benchmark" in facts
    assert not {"settings.seed", "weights", "cpu.model"} & set(facts)
