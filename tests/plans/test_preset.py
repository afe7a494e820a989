"""Tests of presets: each loads, explains its values and fits its targets; bad files are errors."""

from dataclasses import fields
from pathlib import Path

import pytest
from known_models import llama_8b, llama_8b_head, smollm2

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.memory import check_memory
from eagle3.plans.plan import Plan
from eagle3.plans.preset import load_preset, preset_names
from eagle3.plans.roofline import expected_round
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError

NAMES = [
    *("cpu", "h100", "h200", "jetson-agx-orin", "jetson-orin-nano", "jetson-thor"),
    *("l4", "rtx-4090"),
]
DEVICE = """
[device]
name = "a board"
source = "made up"
memory_bytes = 8_000_000_000
reserved_bytes = 0
bandwidth_bytes_per_s = 1e11
[device.peak_flops]
float32 = 1e12
"""


def written(folder: Path, text: str) -> str:
    (folder / "own.toml").write_text(text)
    return str(folder / "own.toml")


def test_the_presets_are_these() -> None:
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_can_be_built_and_reckoned_with(name: str) -> None:
    preset = load_preset(name)
    preset.plan.require_built()
    assert preset.plan.compute_capability == preset.device.compute_capability
    check_memory(smollm2(), None, preset.plan, preset.device)
    assert expected_round(smollm2(), None, preset.plan, preset.device).plain.bound == "memory"


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_preset_has_a_reason(name: str) -> None:
    """Each value but name and source has a comment above it or above its group of lines."""
    explained = True
    for line in load_preset(name).text.splitlines():
        if not line or line.startswith(("[", "name", "source")):
            explained = False
        elif line.startswith("#"):
            explained = True
        else:
            assert explained, line


@pytest.mark.parametrize(
    "name", ["h100", "h200", "jetson-agx-orin", "jetson-thor", "l4", "rtx-4090"]
)
def test_an_8b_target_fits_where_it_should(name: str) -> None:
    preset = load_preset(name)
    check_memory(llama_8b(), llama_8b_head(), preset.plan, preset.device)


def test_an_8b_target_does_not_fit_8_gb() -> None:
    preset = load_preset("jetson-orin-nano")
    with pytest.raises(
        PlanError, match=r"needs 18.* GB .*, but NVIDIA Jetson Orin Nano 8GB has 6.00"
    ):
        check_memory(llama_8b(), llama_8b_head(), preset.plan, preset.device)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    plan = "[plan]\nmax_seq_len = 512\n[plan.tree]\ndraft_top_k = 4\n"
    preset = load_preset(written(tmp_path, DEVICE + plan))
    assert preset.name == "own" and preset.device.usable_bytes == 8_000_000_000
    assert preset.plan == Plan(max_seq_len=512, tree=TreePlan(draft_top_k=4))
    assert load_preset(written(tmp_path, DEVICE)).plan == Plan()


def test_a_file_may_name_a_presets_device(tmp_path: Path) -> None:
    text = 'device = "l4"\n[plan]\nbackend = "ort-cuda"\nlowering = "portable"\n'
    preset = load_preset(written(tmp_path, text))
    assert preset.device == load_preset("l4").device and preset.plan.backend == "ort-cuda"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "device is missing: add a .device. table"),
        ("[device", "own.toml is not valid TOML"),
        (
            DEVICE + "[plans]\n",
            "own.toml: the file has the unknown keys plans: .* are device, plan",
        ),
        (DEVICE + "[plan]\nmax_len = 3\n", "plan has the unknown keys max_len: .* are max_seq"),
        (DEVICE + "[plan.tree]\ntop_k = 3\n", "plan.tree has the unknown keys top_k: .* are draft"),
        (DEVICE.replace("source", "origin"), "device has the unknown keys origin: .* are name"),
        (DEVICE.replace('source = "made up"\n', ""), "device is missing source: add"),
        (DEVICE.replace("1e11", "0"), "device.bandwidth_bytes_per_s must be greater than 0, got 0"),
        (
            DEVICE.replace("1e11", "nan"),
            "device.bandwidth_bytes_per_s must be a finite .*, got nan",
        ),
        (DEVICE.replace("1e11", '"fast"'), "bandwidth_bytes_per_s must be a .* number, got 'fast'"),
        (DEVICE.replace("= 0", "= 8_000_000_000"), "less than memory_bytes .*, got 8000000000"),
        (DEVICE.replace("float32", "fp32"), "device.peak_flops has .* dtype 'fp32': use float32"),
        (DEVICE.replace('"a board"', "3"), "device.name must be a .* string, got 3"),
        (DEVICE + "[plan]\ntree = 3\n", r"plan.tree must be a table \[plan.tree\], got 3"),
        (DEVICE + "[plan]\ndtype = 'fp16'\n", "own.toml: dtype must be one of .* got 'fp16'"),
        (
            DEVICE + "[plan]\nlowering = 'portable'\nbackend = 'ort-cuda'\n",
            "a board has no compute_capability",
        ),
        ('device = "l5"', "preset 'l5' not found: use one of cpu"),
        (
            'device = "l4"\n[plan]\nbackend = "tensorrt"\nlowering = "portable"\n'
            'compute_capability = "8.7"\n',
            "plan.compute_capability is 8.7, but NVIDIA L4 has 8.9",
        ),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_preset(written(tmp_path, text))


def test_a_preset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match="preset 'rtx' not found: use one of cpu, h100.* or the path of a"
    ):
        load_preset("rtx")
    with pytest.raises(PlanError, match="none.toml cannot be read: No such file"):
        load_preset(str(tmp_path / "none.toml"))


def test_device_fields_are_what_a_preset_may_say() -> None:
    """The JSON of a device has the fields of `DeviceSpec` and no others."""
    preset = load_preset("l4")
    assert set(preset.to_json()["device"]) == {each.name for each in fields(DeviceSpec)}
